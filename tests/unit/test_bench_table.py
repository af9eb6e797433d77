"""The table of ``make bench``: intervals, busy machines, resuming, deadlines, text."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # behind everything else: names of benchmarks are common ones

import table as bench  # noqa: E402
from common import ratio  # noqa: E402
from recovery import join  # noqa: E402
from rows import catalogue, machine, readers, text  # noqa: E402
from rows.results import Result, Results  # noqa: E402
from rows.row import FEWEST_VALUES, Measured, Peer, Row, compare, share_of_limit  # noqa: E402

# Recorded on a virtual machine of two cores, ten seconds apart: idle, then one core taken by a loop.
IDLE = (
    "cpu  7461802 5 1532016 3610214 27263 0 42151 90817 0 0\ncpu0 3733201 1 769118 1799123 13204 0 20912 45210 0 0",
    "cpu  7461819 5 1532027 3612175 27266 0 42152 90818 0 0\ncpu0 3733212 1 769122 1800101 13206 0 20913 45210 0 0",
)
BUSY = "cpu  7462805 5 1532081 3613121 27266 0 42161 90818 0 0\ncpu0 3734198 1 769170 1800101 13206 0 20913 45210 0 0"
STOLEN = "cpu  7461919 5 1532127 3613875 27266 0 42152 90918 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0"

ROW = Row(
    "step-toy", "step of a toy", "ms", (("a.py",),), lambda _: Measured([]),
    {"slow": Peer("Slow", package="", settings="defaults"), "fast": Peer("Fast", package="")}, (("a.py", "--tiny"),),
    limit="nothing", why={"fast": "it does not add in order"},
)  # fmt: skip
VERSIONS = {"slow": "1.0", "fast": "1.0", "own torch": "2.8"}
OURS = [10.0, 10.1, 9.9, 10.2, 9.8, 10.0, 10.1]


def result(**changes: object) -> Result:
    """Return a result of :data:`ROW`."""
    peers = {"slow": [2 * value for value in OURS], "fast": [0.5 * value for value in OURS]}
    made = Result(
        "step-toy", "usual", [["a.py"]], VERSIONS, "2030-01-31", ours=OURS, peers=peers, limit=[5.0] * 7, paired=True
    )
    return dataclasses.replace(made, **changes)


def whole_page(*results: Result | None, row: Row = ROW) -> str:
    """Return the page of such rows."""
    founds = [text.Found(row, one) for one in results]
    return text.page(founds, why_missing=lambda _: "run make bench-peers")


# -- the machine


def judged(during, own_s, **more):
    return machine.judge(*(tuple(map(machine.Ticks.read, pair)) for pair in (IDLE, during)), own_s=own_s, **more)


def test_only_work_of_others_during_a_row_is_named():
    used_s = (986 + 54 + 9) / machine.TICKS

    assert judged(IDLE, 0.0).busy() == ""
    assert judged(IDLE, 0.0).before == pytest.approx(29 / 1994)
    assert judged((IDLE[1], BUSY), 0.0).busy() == "53% used by others during it"
    assert judged((IDLE[1], BUSY), used_s).busy() == ""
    assert judged((IDLE[1], BUSY), used_s - 1.0, kernel_s=1.0).busy() == ""


def test_time_stolen_by_the_host_is_named():
    assert judged((IDLE[1], STOLEN), 2.0).busy() == "5% stolen by the host"


# -- intervals


@pytest.mark.parametrize(("paired", "values"), [(True, FEWEST_VALUES), (False, 9)])
def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says(paired, values):
    """Medians of skewed times whose true ratio is 0.8; within a block both are slowed alike. 95 % of 120 is 114 +- 2.4."""
    rng, covered = random.Random(values), 0
    for trial in range(120):
        blocks = [math.exp(rng.gauss(0, 0.3)) if paired else 1.0 for _ in range(values)]
        a = [0.8 * block * math.exp(rng.gauss(0, 0.1)) for block in blocks]
        b = [block * math.exp(rng.gauss(0, 0.1)) for block in blocks]
        found = ratio(a, b, paired=paired, seed=trial)
        covered += found["low"] <= 0.8 <= found["high"]

    assert covered >= 106


def test_below_five_values_there_is_no_interval():
    few = result(ours=[10.0] * 4)

    (fast, slow) = compare(ROW, few.measured)

    assert (fast.low, fast.high, fast.values, slow.is_below) == (None, None, 4, False)
    assert "2.00 (only 4 values)" in whole_page(few)


def test_the_best_peer_comes_first_and_more_may_be_better():
    (best, other) = compare(ROW, result().measured)
    assert (best.peer, other.peer) == ("fast", "slow")
    assert other.is_below
    assert other.ratio == pytest.approx(0.5)
    assert share_of_limit(ROW, result().measured) == pytest.approx(0.5)

    rates = dataclasses.replace(ROW, more_is_better=True)
    (best, other) = compare(rates, result().measured)
    assert (best.peer, other.peer) == ("slow", "fast")
    assert other.is_below
    assert best.ratio == pytest.approx(2.0)
    assert share_of_limit(rates, result().measured) == pytest.approx(2.0)


# -- text


def test_a_row_that_is_better_and_one_that_is_not():
    page = whole_page(result())

    assert "10.0 ms   5.00 ms, Fast (1.0)  5.00 ms  50%      2.00 (2.00-2.00)" in page
    assert "- step-toy, Fast: 2.00 (2.00-2.00): it does not add in order" in page
    assert "step-toy, Slow: 0.50" not in page
    assert "Without a result" not in page


def test_a_peer_that_is_better_without_a_reason_is_not_explained():
    assert "Fast: 2.00 (2.00-2.00): not explained" in whole_page(result(), row=dataclasses.replace(ROW, why={}))


@pytest.mark.parametrize(
    ("change", "remark"),
    [({"busy": "31% used by others"}, "busy: 31% used by others"), ({"size": "tiny"}, "tiny: does not count")],
)
def test_a_busy_or_tiny_row_has_a_remark_instead_of_an_interval(change, remark):
    page = whole_page(result(**change))

    assert f"2.00 ({remark})" in page
    assert "2.00-2.00" not in page
    assert "Not below 1" not in page


def test_a_failed_row_does_not_spoil_the_others():
    page = whole_page(result(failed="step_time.py had not ended after 150 s"), result(), None)

    lines = page.splitlines()
    assert lines[4].split() == ["step", "of", "a", "toy", "failed"]
    assert "2.00 (2.00-2.00)" in lines[5]
    assert lines[6].split()[4:] == ["not", "measured"]
    assert "- step-toy: step_time.py had not ended after 150 s" in lines


def test_a_peer_that_did_not_run_is_listed():
    page = whole_page(result(peers={"fast": OURS}))

    assert "- step-toy, Slow: run make bench-peers" in page


def test_the_table_for_the_documentation_is_markdown():
    page = text.page([text.Found(ROW, result())], lambda _: "", markdown=True)

    assert "| step of a toy |  10.0 ms | 5.00 ms, Fast (1.0) | 5.00 ms |     50% |   2.00 (2.00-2.00) |" in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.1234, "0.123"), (1.234, "1.23"), (58.74, "58.7"), (1834.2, "1,834"), (0.00123, "0.0012")],
)
def test_numbers_have_three_digits(value, shown):
    assert text.number(value) == shown


# -- resuming


def test_a_result_is_kept_and_read_again(tmp_path):
    results = Results(tmp_path / "a" / "b")

    results.write(result())

    assert results.read("step-toy", "usual") == result()
    assert results.read("step-toy", "long") is None
    assert result().counts_for(ROW, "usual", VERSIONS)


@pytest.mark.parametrize(
    ("changes", "size", "versions"),
    [
        ({"busy": "31% used by others"}, "usual", VERSIONS),
        ({"failed": "no result"}, "usual", VERSIONS),
        ({"commands": [["b.py"]]}, "usual", VERSIONS),
        ({}, "tiny", VERSIONS),
        ({}, "usual", {**VERSIONS, "own torch": "2.9"}),
    ],
)
def test_what_does_not_count_is_measured_again(changes, size, versions):
    assert not result(**changes).counts_for(ROW, size, versions)


def test_a_file_that_was_cut_short_is_no_result(tmp_path):
    results = Results(tmp_path)
    results.path("step-toy", "usual").write_text('{"row": "step-t')

    assert results.read("step-toy", "usual") is None


def test_what_a_reader_does_not_understand_is_named_with_its_kind(tmp_path, monkeypatch):
    row = dataclasses.replace(ROW, read=lambda contents: Measured(contents[0]["ours"] + 1))
    monkeypatch.setattr(bench, "run_commands", lambda *_: [{"ours": None}])
    monkeypatch.setattr(bench, "adopt_orphans", lambda: None)
    monkeypatch.setattr(bench, "watch_before", lambda: None)

    assert bench.measure(row, "usual", Results(tmp_path)) == 1

    assert (
        Results(tmp_path).read(ROW.name, "usual").failed.startswith("TypeError at what its scripts wrote: unsupported")
    )


def test_an_earlier_result_stays_until_there_is_another_and_is_not_taken_for_it(tmp_path, monkeypatch):
    results = Results(tmp_path)
    results.write(result())

    def begin(command):
        assert results.read(ROW.name, "usual") == result()
        return Ended()

    monkeypatch.setattr(bench.subprocess, "Popen", begin)
    done = bench.measure_apart(ROW, "usual", results)

    assert done.failed == "its process ended with -9 and left no result"
    assert results.read(ROW.name, "usual") == done


class Ended:
    """A process that was killed."""

    returncode = -9

    def wait(self, _: float) -> int:
        """Return at once."""
        return self.returncode

    def poll(self) -> int:
        """Return how it ended."""
        return self.returncode


# -- the command


def run_table(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    command = [sys.executable, str(BENCHMARKS / "table.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1", **env}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "stepp"), "there is no row 'stepp'; rows and groups are allreduce,"),
        (("--tiny", "--long"), "not allowed with argument"),
    ],
)
def test_a_bad_option_gives_one_line(words, message):
    done = run_table(*words)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("table.py: ")
    assert message in done.stderr


def test_a_row_runs_and_is_not_run_again(tmp_path):
    first = run_table("--tiny", "--only", "import", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*/*/import-tiny.json")
    results = Results(path.parent)
    found = results.read("import", "tiny")
    results.write(dataclasses.replace(found, busy="", date="2030-01-31"))  # whatever the machine did meanwhile

    second = run_table("--tiny", "--only", "import", "--out", str(tmp_path))

    assert (first.returncode, second.returncode) == (0, 0)
    assert "tiny: does not count" in first.stdout
    assert len(found.ours) == 1
    assert "[1/1] import: measured on 2030-01-31" in second.stderr


SCRIPTS = {
    "gives_nothing.py": "raise SystemExit('ValueError: no such thing')",
    "hangs.py": """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
""",
}
RUN_ONE = """
import sys
from pathlib import Path
from rows import process
process.HERE, script = Path(sys.argv[1]), sys.argv[2]
process.adopt_orphans()
try:
    process.run_commands([(script,)], process.HERE / "found", 2.0, process.SampledTime())
except process.RowFailed as failure:
    print(failure)
"""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("gives_nothing.py", "gives_nothing.py ended with 1: ValueError: no such thing"),
        ("hangs.py", "hangs.py had not ended after 2 s"),
    ],
)
def test_a_script_without_a_result_fails_in_one_line_and_leaves_no_process(script, why, tmp_path):
    (tmp_path / script).write_text(SCRIPTS[script])

    done = subprocess.run(
        [sys.executable, "-c", RUN_ONE, str(tmp_path), script], capture_output=True, text=True, timeout=60, check=True,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
    )  # fmt: skip

    assert done.stdout.strip() == why
    if script == "hangs.py":
        child = int((tmp_path / "found" / "output.log").read_text().split()[0])
        assert not Path(f"/proc/{child}").exists()


# -- what scripts write


def held(*values: float) -> list[dict[str, float]]:
    """Return what ``save_load.py`` and ``join.py`` write for such times."""
    return [{"held_s": value, "held_ms": value} for value in values]


STEP = {
    "systems": {"alone": {}, "ddp-gloo": {}, "holdfast": {}, "torchft": {"failed": "no quorum"}},
    "blocks_ms": {"alone": [[1, 2, 3]], "ddp-gloo": [[4, 6, 5]], "holdfast": [[3, 3, 4]], "torchft": [[9]]},
}
GOODPUT = [
    {"system": "holdfast-respawn", "mtbf_s": None, "useful_per_s": 9},
    {"system": "holdfast-respawn", "mtbf_s": 5, "useful_per_s": 8},
    {"system": "torchrun", "mtbf_s": None, "useful_per_s": 7},
    {"system": "torchrun", "mtbf_s": 5, "useful_per_s": 2},
]


@pytest.mark.parametrize(
    ("read", "contents", "expected"),
    [
        (
            readers.all_reduce,
            [{"results": [{"times_ms": {"gloo": [3], "shared": [1], "memcpy": [2]}}]}],
            Measured([1], {"gloo": [3]}, [2], paired=True),
        ),
        (readers.step("holdfast"), [{"results": [STEP]}], Measured([3], {"ddp-gloo": [5]}, [2], paired=True)),
        (
            readers.hosts,
            [
                {
                    "results": [
                        {
                            "systems": {
                                name: {"steps_ms": [t]} for name, t in (("ddp-gloo", 4), ("holdfast", 3), ("wire", 2))
                            }
                        }
                    ]
                }
            ],
            Measured([3], {"ddp-gloo": [4]}, [2]),
        ),
        (
            readers.memory,
            [{"results": [{"system": name, "bytes": 9 + i} for i, name in enumerate(("ddp", "shared", "alone") * 2)]}],
            Measured([10, 13], {"ddp": [9, 12]}, [11, 14]),
        ),
        (
            readers.kill,
            [
                {
                    "rows": {
                        "rollback": [{"recover_ms": 5, "step_ms": 1}],
                        "torchrun": [{"recover_ms": 7}],
                        "ray": [{"recover_ms": 9}],
                    }
                }
            ],
            Measured([5], {"torchrun": [7], "ray": [9]}, [1]),
        ),
        (
            readers.join,
            [{"rows": {"spare": held(4), "whole": held(3), "torchft": held(6)}, "copy_ms": [1]}],
            Measured([3], {"torchft": [6]}, [1]),
        ),
        (
            readers.store("save", "dd"),
            [{"results": {"save": {"dd": held(2), "holdfast": held(1), "dcp": held(3)}}}],
            Measured([1], {"dcp": [3]}, [2], paired=True),
        ),
        (
            readers.start_job,
            [{"first_step_s": {"gloo": [3], "ulfm": [4], "torchrun": [6]}}, {"values": {"import torch": [2]}}],
            Measured([3], {"torchrun": [6]}, [2]),
        ),
        (readers.goodput, [{"results": GOODPUT}] * 2, Measured([8, 8], {"torchrun": [2, 2]}, [9, 9], paired=True)),
        (readers.simulator, [{"settings": {"repetitions": 10}, "sweep": {"seconds": 2}}] * 2, Measured([5, 5])),
        (
            readers.injection("holdfast", "by value"),
            [{"seconds": {"clock": {"holdfast": [1], "by value": [3], "pwrite": [0.5]}}}],
            Measured([1000], {"by value": [3000]}, [500], paired=True),
        ),
    ],
)
def test_what_a_script_writes_becomes_values(read, contents, expected):
    assert read(contents) == expected


# -- the rows


def test_all_rows_together_take_less_than_an_hour():
    assert sum(row.limit_s + machine.BEFORE_S for row in catalogue.ROWS if not row.only_long) <= catalogue.HOUR_S


def test_names_of_rows_are_distinct_and_their_scripts_exist():
    names = [row.name for row in catalogue.ROWS]

    assert len(set(names)) == len(names)
    for row in catalogue.ROWS:
        for size in ("tiny", "usual", "long"):
            commands = row.commands_of(size)
            assert commands
            assert all((BENCHMARKS / command[0]).is_file() for command in commands), row.name
        assert set(row.why) <= set(row.peers)


def test_the_longest_time_between_steps_counts_while_a_newcomer_joins():
    times = dict(enumerate((0.0, 1.0, 2.0, 5.0, 6.0, 10.0, 11.0)))
    done = {step: (t_s, 3) for step, t_s in times.items()}

    assert join.longest_ms(done, range(2, 5)) == 3000
    assert join.longest_ms(done, range(2, 7)) == 4000
    assert join.longest_ms(done, range(4, 5)) == 0


BURNS = """
import os, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.0: pass"])
"""
COUNT_ONE = """
import sys
from pathlib import Path
from rows import process
process.HERE, process.SAMPLE_S = Path(sys.argv[1]), 0.05
process.adopt_orphans()
sampled = process.SampledTime()
try:
    process.run_commands([("burns.py",)], process.HERE / "found", 30.0, sampled)
except process.RowFailed:
    print(process.children_s(), sampled.seconds())
"""


def test_the_time_of_a_process_that_no_parent_waited_for_is_counted(tmp_path):
    (tmp_path / "burns.py").write_text(BURNS)

    done = subprocess.run(
        [sys.executable, "-c", COUNT_ONE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
    )  # fmt: skip
    waited_for_s, sampled_s = map(float, done.stdout.split())

    assert waited_for_s < 0.8, "the kernel has counted it, so there is nothing to sample"
    assert 0.8 < sampled_s < 2.0
