"""Real workers on a stream: killed, stopped and resumed in other numbers, every sample is trained on once.

Workers write down the samples of each slice that they compute. A slice that is computed again must have the same samples, so
all that is trained on is what was written, each slice once, without what the records say was lost.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from jobs import assert_landed, holdfast, run_report

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "support" / "train_stream.py"


def run(tmp_path, *options, script=(), **expected):
    """Run the training with checkpoints, and return its report."""
    tmp_path.mkdir(exist_ok=True)
    given = ("--fabric", "gloo", "--checkpoint-dir", tmp_path / "c", *options, SCRIPT, tmp_path, *script)
    report = run_report(tmp_path, *map(str, given), timeout=240, **expected)
    (tmp_path / "report").rename(tmp_path / f"report-{len(list(tmp_path.glob('report-*')))}")
    return report


def trained(folder, *reports):
    """Return how often each sample of each epoch was computed for a step, and how many of each epoch were lost."""
    lines = {
        line for path in folder.glob("samples-*.jsonl") for line in path.read_text().splitlines() if line[-1] == "}"
    }
    slices = [json.loads(line) for line in lines]
    counts = Counter((slice_["epoch"], number) for slice_ in slices for number in slice_["numbers"])
    lost = Counter()
    for report in reports:
        for gone in report["lost"]:
            assert len(gone["ids"]) == len(set(gone["ids"]))
            lost[gone["epoch"]] += len(gone["ids"])
    return counts, lost


def once(count, epochs=1):
    return Counter({(epoch, number): 1 for epoch in range(epochs) for number in range(count)})


@pytest.mark.parametrize("how", [(), ("--stateful", "--loaders", 1)], ids=["replayed", "with a state, read ahead"])
def test_a_job_on_a_stream_shrinks_and_is_resumed_and_no_sample_is_missed_or_repeated(tmp_path, how):
    size = ("--count", 1500, "--epochs", 2, *how)
    kill = ("--inject", "kill:rank=1,step=4,phase=allreduce")

    stopped = run(tmp_path, "-n", 4, "--stop-after", 19, *kill, script=size, exit_code=4)
    resumed = run(tmp_path, "-n", 2, "--resume", script=size)

    assert_landed(stopped, 1)
    assert stopped["samples"] == {"planned": 2000, "committed": 2000, "lost": 0, "repeated": 0}
    assert resumed["samples"] == {"planned": 3000, "committed": 3000, "lost": 0, "repeated": 0}
    assert trained(tmp_path, stopped, resumed) == (once(1500, 2), Counter())
    assert resumed["steps"] == 10
    undisturbed = run(tmp_path / "alone", "-n", 1, "--slices", 4, script=size)
    assert resumed["replicas"] == undisturbed["replicas"]


def test_a_worker_that_joins_reads_the_stream_up_to_the_others(tmp_path):
    kill = ("--respawn", "--inject", "kill:rank=1,step=4,phase=optimizer")

    grown = run(tmp_path, "-n", 2, *kill, script=("--count", 2000, "--await-at", 12))

    assert_landed(grown, 1)
    assert grown["workers"]["ranks_finished"] == [0, 2]
    assert grown["samples"] == {"planned": 2000, "committed": 2000, "lost": 0, "repeated": 0}
    assert trained(tmp_path, grown) == (once(2000), Counter())
    assert (tmp_path / "samples-2.jsonl").read_text(), "the newcomer computed slices"


def test_what_forward_loses_of_a_stream_is_noticed(tmp_path):
    kill = ("--inject", "kill:rank=1,step=4,phase=allreduce,bucket=0")

    report = run(tmp_path, "-n", 3, "--strategy", "forward", *kill, script=("--count", 900))

    assert_landed(report, 1)
    lost = report["samples"]["lost"]
    assert lost > 0
    assert report["samples"] == {"planned": 900, "committed": 900 - lost, "lost": lost, "repeated": 0}
    counts, said = trained(tmp_path, report)
    assert counts.total() - said.total() == 900 - lost
    assert (counts, said) != (once(900), Counter()), "the other tests would fail"


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (
            "split",
            "workers read different samples from the stream, after sample 0 of epoch 0: every worker must read the whole",
        ),
        ("sampler", "the sampler gives workers different orders of epoch 0: it must give the whole order"),
        pytest.param("clock", "workers read different samples from the stream, after sample 0", marks=pytest.mark.soak),
    ],
)
def test_workers_that_would_train_on_different_data_end_with_one_line(tmp_path, broken, line):
    done = holdfast("run", "-n", 2, "--fabric", "gloo", SCRIPT, tmp_path, "--broken", broken)

    assert done.returncode not in (0, 4)
    assert line in done.stdout + done.stderr
    assert not any(path.read_text() for path in tmp_path.glob("samples-*.jsonl")), "no step was computed"


@pytest.mark.soak
def test_the_multiset_of_100_000_samples_is_exact_on_8_then_5_then_7_workers(tmp_path):
    """Two resumes and four deaths, under each of which slices change hands."""
    size = ("--count", 100_000, "--batch", 500)
    kills = [("--inject", f"kill:rank={rank},step={step},phase={phase}") for rank, step, phase in KILLS]

    first = run(tmp_path, "-n", 8, "--stop-after", 79, *kills[0], *kills[1], *kills[2], script=size, exit_code=4)
    second = run(tmp_path, "-n", 7, "--resume", "--stop-after", 149, *kills[3], script=size, exit_code=4)
    third = run(tmp_path, "-n", 7, "--resume", script=size)

    assert_landed(first, 1, 6, 0)
    assert_landed(second, 2)
    assert [len(report["workers"]["ranks_finished"]) for report in (first, second, third)] == [5, 6, 7]
    assert third["samples"] == {"planned": 100_000, "committed": 100_000, "lost": 0, "repeated": 0}
    assert trained(tmp_path, first, second, third) == (once(100_000), Counter())
    undisturbed = run(tmp_path / "alone", "-n", 1, "--slices", 8, script=size)
    assert third["replicas"] == undisturbed["replicas"]


KILLS = [(1, 7, "allreduce"), (6, 30, "backward"), (0, 61, "optimizer"), (2, 117, "forward")]
