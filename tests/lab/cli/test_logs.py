"""``holdfast plan`` and ``holdfast simulate`` with a log of failures in place of a mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.cli import main
from holdfast_lab.simulate.assuming import FittedRate, ask
from holdfast_lab.simulate.distributions import Weibull

SCENARIO = """
strategies = ["rollback"]
repetitions = 4
[cluster]
workers = 8
[job]
horizon_s = "10h"
save_every = "10min"
[costs]
step_s = "10s"
save_s = "5s"
restart_s = 30
"""


def holdfast(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture
def lifetimes(tmp_path: Path) -> Path:
    hours = 100 * np.random.default_rng(0).weibull(0.6, 120)
    path = tmp_path / "lifetimes.csv"
    path.write_text("lifetime_h\n" + "".join(f"{hour:.4f}\n" for hour in hours))
    return path


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.csv"
    lines = [f"{3600 * hour},{what},n{node}" for node in range(4) for hour, what in ((0, "add"), (3 + node, "remove"))]
    path.write_text("\n".join(sorted(lines, key=lambda line: int(line.split(",")[0]))))
    return path


def test_a_plan_takes_a_log_and_says_what_it_was_taken_for(lifetimes, tmp_path, capsys):
    out = tmp_path / "out"

    code = holdfast(
        "plan", "--workers", 64, "--mtbf-node", lifetimes, "--no-map", "--repetitions", 2, "--out", out
    )  # fmt: skip

    said = capsys.readouterr()
    assert code == 0
    assert said.err.startswith("lifetimes.csv: lifetimes, lifetime in 'lifetime_h' (h); 120 rows used, none ignored\n")
    assert "(used)" in said.err
    results = json.loads((out / "results.json").read_text())
    known = {one["name"]: one for one in results["known"]}
    assert known["mtbf_node_s"]["source"] == "fitted"
    assert "120 failures in lifetimes.csv" in known["mtbf_node_s"]["why"]
    assert results["question"]["mtbf_node_s"] == pytest.approx(
        next(fit for fit in results["logs"][0]["fits"] if fit["is_used"])["parameters"][0]["value"], rel=5e-3
    )
    assert results["question"]["lifetime"] in ("weibull", "bathtub")
    assert "Lifetimes in the log" in (out / "index.html").read_text()
    rows = {row["name"]: row for row in results["rows"]}
    per_day = 8 * 86_400 / (results["question"]["mtbf_node_s"] + 6 * 3600 * 0.85)
    assert rows["rollback"]["failures_per_day"] == pytest.approx(per_day, rel=0.35)  # at the mean's rate from the start


def test_only_the_mean_counts_where_a_node_is_several_machines_of_the_log():
    lifetime = Weibull(3600.0, 0.5)

    alone, _ = ask({"workers": 8}, None, FittedRate("mtbf_worker_s", lifetime, ""))
    assert alone.lifetime == lifetime
    node, _ = ask({"workers": 8, "workers_per_node": 4}, None, FittedRate("mtbf_worker_s", lifetime, ""))
    assert (node.lifetime, node.mtbf_node_s) == (None, 900.0)
    job, _ = ask({"workers": 8}, None, FittedRate("mtbf_s", lifetime, ""))
    assert (job.lifetime, job.mtbf_node_s) == (None, 8 * 3600.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mtbf-node", "none.csv"], "--mtbf-node must be a time"),
        (["--mtbf-node", "5h", "--log", "unit=h"], "--log and --fit say how to read a log"),
        (["--mtbf-node", "EVENTS"], "without a unit: give --log unit=s"),
        (["--mtbf", "EVENTS", "--log", "unit=s"], "is of single machines (events): give it as --mtbf-node"),
        (["--mtbf-node", "EVENTS", "--log", "unit=s", "--fit", "weibull"], "it needs 5 failures, and there are 4"),
        (["--mtbf-node", "EVENTS", "--log", "unit=s", "--mtbf", "5h"], "give one of --mtbf (of the whole job)"),
    ],
)
def test_a_plan_refuses_in_one_line(events, words, message, capsys):
    words = [str(events) if word == "EVENTS" else word for word in words]

    assert holdfast("plan", "--workers", 8, *words) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def failures(tmp_path: Path) -> Path:
    path = tmp_path / "failures.csv"
    hours = np.sort(np.random.default_rng(1).uniform(0, 400, 81))
    path.write_text("time_h,node,part\n" + "".join(f"{hour},n{k % 5},GPU\n" for k, hour in enumerate(hours)))
    return path


def test_a_list_of_failures_is_one_of_the_job_or_of_its_nodes_and_can_be_replayed(failures, tmp_path, capsys):
    hours = [float(line.split(",")[0]) for line in failures.read_text().splitlines()[1:]]
    plan = ("plan", "--workers", 5, "--work-s", "10min", "--step-s", "60s", "--no-map", "--repetitions", 2, "--json")
    how = ("--log", "as=failures", "--fit", "exponential")

    for option, factor in (("--mtbf", 1), ("--mtbf-node", 5)):
        assert holdfast(*plan, option, failures, *how) == 0
        results = json.loads(capsys.readouterr().out)
        mean_s = results["logs"][0]["fits"][0]["parameters"][0]["value"]
        assert mean_s == pytest.approx(factor * 3600 * (hours[-1] - hours[0]) / 80, rel=1e-2)

    path = tmp_path / "replay.toml"
    trace = '[trace]\nkind = "log"\npath = "failures.csv"\nlevel = "worker"\nreplayed = true\nreading = { as = "failures" }\n'
    path.write_text(SCENARIO.replace("workers = 8", "workers = 5").replace("10h", "390h") + trace)
    assert holdfast("simulate", path, "--json") == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    failed = sum(0 < hour - hours[0] < 390 for hour in hours)
    assert failed - 2 <= row["failures"] <= failed  # one within the recovery from another counts with it
    assert row["goodput"] > 0.9


def test_a_log_with_an_unknown_state_ends_with_2_and_one_line(tmp_path, capsys):
    path = tmp_path / "jobs.txt"
    path.write_text("JobID|Elapsed|State\n1|01:00:00|COMPLETED\n2|01:00:00|BOILED\n")

    assert holdfast("plan", "--workers", 8, "--mtbf-node", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "jobs.txt: it is not known what these words in 'State' mean: BOILED 1; known: censored: COMPLETED 1" in line


def test_a_scenario_draws_from_the_fit_or_replays_the_log(lifetimes, events, tmp_path, capsys):
    drawn = tmp_path / "drawn.toml"
    drawn.write_text(
        SCENARIO + '[[failures]]\nlog = "lifetimes.csv"\nfit = "weibull"\nstationary = true\nrepair = "1h"\n'
    )
    assert holdfast("simulate", drawn, "--json") == 0
    said = capsys.readouterr()
    assert "weibull, mean " in said.err
    results = json.loads(said.out)
    mean_h = results["logs"][0]["fits"][1]["parameters"][0]["value"] / 3600
    assert results["rows"][0]["failures"] == pytest.approx(8 * 10 / (mean_h + 1), rel=1)

    replayed = tmp_path / "replayed.toml"
    trace = '[trace]\nkind = "log"\npath = "events.csv"\nlevel = "worker"\nreplayed = true\nreading = { unit = "s", span = "9h" }\n'
    replayed.write_text(SCENARIO.replace("workers = 8", "workers = 4").replace("10h", "9h") + trace)
    assert holdfast("simulate", replayed, "--json") == 0
    said = capsys.readouterr()
    assert "events.csv: events, time in column 1 (s)" in said.err
    assert json.loads(said.out)["rows"][0]["failures"] == 4


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[[failures]]\nlog = "events.csv"\n', 'without a unit: give reading = { unit = "s" }'),
        ('[[failures]]\nlog = "lifetimes.csv"\nmean_s = "1h"\n', "has a log, to which its lifetime is fitted, and also mean_s"),
        ('[[failures]]\nmean_s = "1h"\nfit = "weibull"\n', "has fit or reading but no log"),
        ('[[failures]]\nmean_s = "1h"\nstationary = true\nage_s = 5\n', "units have an age_s or are stationary, not both"),
        ('[trace]\nkind = "log"\npath = "lifetimes.csv"\n', "does not say when machines failed, so that it cannot be replayed"),
        ('[trace]\nkind = "log"\npath = "events.csv"\nspan_s = 9\n', "how to read it is said in reading"),
        ('[trace]\nkind = "spot"\npath = "events.csv"\nreading = { unit = "s" }\n', "which only kind log takes"),
    ],
)  # fmt: skip
def test_a_scenario_refuses_in_one_line(lifetimes, events, tmp_path, table, message, capsys):
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO + table)

    assert holdfast("simulate", path) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
