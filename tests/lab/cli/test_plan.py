"""``holdfast plan``: the answer can be checked by hand, and lists its assumptions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast_lab.simulate.assuming import ask
from holdfast_lab.simulate.measured import read_measured

SCENARIO = Path(__file__).parents[3] / "examples" / "scenarios" / "trace.toml"


def holdfast(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert holdfast("plan", *words, "--no-map", "--json") == 0
    return json.loads(capsys.readouterr().out)


def by_name(answer: dict) -> dict:
    return {row["name"]: row for row in answer["rows"]}


def test_the_answer_says_what_to_do_why_and_what_it_assumed(tmp_path, capsys):
    code = holdfast("plan", "--workers", 1024, "--mtbf-node", "264d", "--repetitions", 4, "--no-map", "--out", tmp_path)

    text = capsys.readouterr().out
    assert code == 0
    assert text.startswith("Use --strategy rollback, with a checkpoint every ")
    assert "holdfast run --strategy rollback --checkpoint-dir DIR --checkpoint-every " in text
    assert "There is a failure every 2.06 d: 128 nodes of 8 workers" in text  # 264 d / 128
    answer = json.loads((tmp_path / "results.json").read_text())
    assumed = {one["name"]: one for one in answer["known"] if one["source"] == "assumed"}
    assert {"step_s", "state_bytes", "write_bytes_per_s", "restart_s", "repair_s", "workers_per_node"} <= set(assumed)
    for name in assumed:
        assert f"--{name.replace('_', '-')} " in text, "an assumption is not said"
    assert answer["question"]["spares"] == 8  # 10 % of the time a node is away; a second spare would hardly be used
    assert answer["without_spares"]["relaunch"] < answer["without_spares"]["slices"] < answer["without_spares"]["even"]
    assert (tmp_path / "index.html").read_text().count("<svg") == 2


def test_partial_costs_further_steps_the_answer_says_so_and_the_command_does_what_was_simulated(capsys, tmp_path):
    words = ("plan", "--workers", 256, "--mtbf-node", "30d", "--model", "split", "--state-bytes", "1.4TB")
    words += ("--write-bytes-per-s", "20GB/s", "--repetitions", 4, "--no-map")

    assert holdfast(*words, "--out", tmp_path) == 0
    text = capsys.readouterr().out
    usual = by_name(json.loads((tmp_path / "results.json").read_text()))["partial"]
    dear = by_name(plan(capsys, *words[1:-1], "--stale-iterations", 400))["partial"]

    [headline] = [line for line in text.splitlines() if line.startswith("Use --strategy partial")]
    price = "With partial each failure costs 4 further steps (0.25 x --mirror-every: holdfast study scar, half of"
    assert price in headline
    assert "holdfast run --strategy partial --checkpoint-dir DIR --checkpoint-every " in text
    assert " --mirror-every 16 --fabric gloo --nnodes 33 -n 8 --slices 256 ..." in text  # a spare node beside 32
    assert "steps a failure costs" in text
    # 400 steps of 5 s in place of 4 at each failure that is survived: 85 % of those in 0.94 days
    assert usual["goodput"] - dear["goodput"] == pytest.approx(396 * 5 * 0.85 / (0.9375 * 86_400), abs=0.006)


@pytest.mark.soak
def test_the_map_says_who_wins_with_more_workers_and_worse_machines(tmp_path, capsys):
    code = holdfast("plan", "--workers", 1024, "--mtbf-node", "264d", "--repetitions", 4, "--out", tmp_path)

    assert code == 0
    assert "node fails every" in capsys.readouterr().out
    cells = json.loads((tmp_path / "results.json").read_text())["map"]
    assert len(cells) == 20
    best, worst = cells[0], cells[-1]
    assert (best["workers"], worst["workers"]) == (64, 16384)
    assert best["wins"] == "any"
    assert worst["wins"] == "rollback"
    assert worst["goodput_rollback"] > worst["goodput_relaunch"] + 0.05
    assert (tmp_path / "index.html").read_text().count("<svg") == 3


def test_the_intervals_are_those_of_the_formulas_and_goodput_that_of_the_closed_form(capsys):
    words = (
        "--workers",
        100,
        "--workers-per-node",
        1,
        "--mtbf",
        "2h",
        "--step-s",
        1,
        "--save-s",
        20,
        "--load-s",
        30,
        "--restart-s",
        60,
    )
    rest = ("--detect-s", 0, "--repair-s", 0, "--whole-job-share", 0.25, "--work-s", "10d", "--repetitions", 16)

    answer = plan(capsys, *words, *rest)

    rows = by_name(answer)
    assert rows["relaunch"]["young_s"] == pytest.approx(math.sqrt(2 * 20 * 7200))
    assert rows["rollback"]["young_s"] == pytest.approx(math.sqrt(2 * 20 * 7200 * 4))
    # Daly's complete model: (tau / M) / (e^(R/M) (e^((tau + delta)/M) - 1)) of the time is useful.
    tau = rows["relaunch"]["interval_s"]
    expected = tau / 7200 / (math.exp(90 / 7200) * math.expm1((tau + 20) / 7200))
    assert tau == pytest.approx(rows["relaunch"]["exact_s"], abs=1)
    assert rows["relaunch"]["goodput"] == pytest.approx(expected, abs=0.005)
    assert answer["best"] == "rollback"
    assert rows["rollback"]["goodput"] > rows["relaunch"]["goodput"] + 0.03


def test_what_a_run_measured_goes_before_what_is_assumed_and_after_what_is_given(tmp_path):
    failure = {
        "recovery": 0,
        "decision": "redo",
        "t_s": 10.0,
        "detect_s": 0.03,
        "times_s": {"Revoke": 0.001, "Shrink": 0.002, "LoadCheckpoint": 0.5},
    }
    report = {
        "workers": {"started": 4},
        "steps": 100,
        "step_s": {"p50": 0.2, "p99": 0.3},
        "failures": [failure, failure | {"detect_s": 0.05}, failure | {"recovery": 1, "t_s": 20.05, "detect_s": 0.27}],
    }
    saved = {
        "event": "CheckpointSaved",
        "t_s": 1.0,
        "rank": 0,
        "step": 5,
        "path": "",
        "size_bytes": 4000,
        "seconds": 0.01,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    begun = {"event": "StepCommitted", "t_s": 20.0, "rank": 0, "step": 9, "epoch": 0, "samples": 8, "workers": 4}
    lines = [saved, begun | {"metrics": {}}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    question, facts = ask({"mtbf_s": 3600.0, "load_s": 2.0}, read_measured(tmp_path))

    known = {one.name: (one.value, one.source) for one in facts}
    assert question.workers == 4
    assert known["workers"] == (4, "measured")
    assert known["step_s"] == (0.2, "measured")
    # The median of two recoveries, not of three workers; in the second survivors computed until 20.2, and noticed at 20.32.
    assert known["detect_s"] == (pytest.approx((0.05 + 0.12) / 2), "measured")
    assert known["regroup_s"] == (pytest.approx(0.003), "measured")
    assert known["save_s"] == (0.01, "measured")
    assert known["state_bytes"] == (4000, "measured")
    assert known["load_s"] == (2.0, "given")
    assert known["restart_s"] == (300.0, "assumed")


BAD = {
    "nothing": ([], "--workers is missing"),
    "no rate": (["--workers", 8], "give one of --mtbf (of the whole job), --mtbf-node (of one node), --mtbf-worker"),
    "two rates": (["--workers", 8, "--mtbf", "1h", "--mtbf-node", "1d"], "give one of --mtbf"),
    "a wrong unit": (["--workers", 8, "--mtbf", "5GB"], "--mtbf must be a time: "),
    "a size for a speed": (["--workers", 8, "--mtbf", "1h", "--write-bytes-per-s", "2GB"], "--write-bytes-per-s must be a speed: "),
    "no workers": (["--workers", 0, "--mtbf", "1h"], "--workers must be at least 1 and at most 1e+06, got 0"),
    "a rate of nothing": (["--workers", 8, "--mtbf", 0], "--mtbf must be more than 0"),
    "a step of nothing": (["--workers", 8, "--mtbf", "1h", "--step-s", 0], "--step-s must be more than 0, got 0"),
    "a share above one": (["--workers", 8, "--mtbf", "1h", "--whole-job-share", 2], "--whole-job-share must be at least 0 and at most 1, got 2"),
    "machines too large": (["--workers", 8, "--mtbf", "1h", "--workers-per-node", 9], "--workers-per-node must be at least 1 and at most 8"),
    "a split that is none": (["--workers", 8, "--mtbf", "1h", "--split", "odd"], "--split must be one of slices, even, got 'odd'"),
    "no report": (["--from-report", "nowhere", "--mtbf", "1h"], "there is no nowhere/report.json; run `holdfast run --report nowhere ...` to write it"),
    "an option that is none": (["--wokers", 8], "No such option"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_in_one_line(what, capsys):
    words, message = BAD[what]

    code = holdfast("plan", *words)

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_neither_command_loads_torch():
    lines = (
        ["plan", "--help"],
        ["plan", "--workers", "8", "--mtbf", "1h", "--repetitions", "2", "--no-map"],
        ["simulate", str(SCENARIO), "--repetitions", "2"],
    )
    script = f"""
import sys
sys.modules["torch"] = None
from holdfast.cli import main
for words in {lines}:
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code, words
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Use --strategy " in done.stdout


@pytest.mark.parametrize("command", [["plan", "--workers", "64", "--mtbf", "1h"], ["simulate", str(SCENARIO)]])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").touch()
    monkeypatch.setattr("holdfast_lab.simulate.planning.monte_carlo", None)
    monkeypatch.setattr("holdfast_lab.simulate.comparing.monte_carlo", None)

    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "taken")])

    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'taken'} is a file: results need a directory or a new path\n"
