"""``holdfast simulate``: good files run, and of a bad one a single line says what is wrong and where."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast_lab.simulate.toml import read_scenario

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.toml"))

GOOD = """
strategies = ["relaunch", { name = "again", strategy = "rollback", split = "even", save_every = "never" }]
[cluster]
workers = 8
[job]
steps = 3600
save_every = "2min"
[costs]
step_s = "1s"
save_s = "500ms"
restart_s = 30
detect_s = "1s"
[[failures]]
level = "worker"
mean_s = "1h"
"""


def holdfast(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return path


def test_the_strategies_stand_side_by_side_on_the_terminal_in_json_and_on_a_page(tmp_path, capsys):
    path = written(tmp_path, GOOD)

    code = holdfast("simulate", path, "--repetitions", 5, "--seed", 3, "--out", tmp_path / "out")

    said = capsys.readouterr()
    assert code == 0
    assert [line.split()[0] for line in said.out.splitlines()[:3]] == ["strategy", "relaunch", "again"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    relaunch, again = results["rows"]
    assert (relaunch["save_every"], again["save_every"]) == (120, 0)
    assert relaunch["repetitions"] == 5
    assert relaunch["goodput_low"] < relaunch["goodput"] < relaunch["goodput_high"] < again["goodput_low"]
    parts = [value for name, value in relaunch.items() if name.startswith("in_")]
    assert sum(parts) == pytest.approx(1)
    assert relaunch["goodput"] == pytest.approx(relaunch["in_useful"], abs=0.01)
    assert results["settings"]["seed"] == 3
    page = (tmp_path / "out" / "index.html").read_text()
    assert "simulated, not measured" in page
    assert page.count("<svg") == 1


def test_the_same_seed_gives_the_same_numbers_and_another_one_others(tmp_path, capsys):
    path = written(tmp_path, GOOD)
    said = []

    for seed in (1, 1, 2):
        holdfast("simulate", path, "--repetitions", 3, "--seed", seed, "--json")
        said.append(json.loads(capsys.readouterr().out)["rows"])

    assert said[0] == said[1] != said[2]


def test_lazy_and_eager_updates_stand_side_by_side(tmp_path, capsys):
    strategies = (
        '[{ name = "lazy", strategy = "forward" }, { name = "eager", strategy = "forward", overlap_optimizer = true }]'
    )
    text = GOOD.replace(GOOD.splitlines()[1], f"strategies = {strategies}").replace('"1h"', '"1000d"')
    text = text.replace("[costs]", "buckets = 4\n[costs]").replace("2min", "never")
    text = text.replace("[costs]", '[costs]\nsum_s = "200ms"\nupdate_s = "100ms"\ncopy_s = "20ms"\nundo_s = "10ms"')
    path = written(tmp_path, text)

    holdfast("simulate", path, "--repetitions", 2, "--json")

    lazy, eager = json.loads(capsys.readouterr().out)["rows"]
    assert (lazy["total_s"], eager["total_s"]) == (
        pytest.approx(3600 * 1.1),
        pytest.approx(3600 * 1.03),
    )  # the last bucket's


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, capsys):
    code = holdfast("simulate", path, "--repetitions", 2)

    assert code == 0
    assert "rollback" in capsys.readouterr().out


BAD = {
    "an unknown key": ("step_s =", "steps =", "[costs] has no key 'steps'; did you mean 'step_s'? (allowed: from_report, "),
    "an unknown table": ("[cluster]", "[clusters]\na = 1\n[cluster]", "the file has no key 'clusters'; did you mean 'cluster'? "),
    "a key that is missing": ("workers = 8", "", "[cluster] has no key 'workers', which is required"),
    "a wrong unit": ('"1h"', '"1GB"', "[[failures]] number 1: mean_s must be a time: "),
    "an unknown unit": ('"500ms"', '"5 parsecs"', "[costs]: save_s must be a time: a number of seconds, or one with us, ms, s, "),
    "text for a number": ("workers = 8", 'workers = "8"', "[cluster]: workers: input should be a valid integer, got '8'"),
    "a number out of range": ("workers = 8", "workers = 0", "workers must be at least 1 and at most"),
    "an unknown strategy": ('"relaunch"', '"pray"', "strategy must be one of rollback, forward, "),
    "an overlap that is none": ("steps = 3600", 'steps = 3600\noverlap_optimizer = "soon"', "[job]: overlap_optimizer: input should be a valid boolean"),
    "an update of a model that is split": ("split =", 'model = "split", overlap_optimizer = true, split =', "overlap_optimizer needs a replicated model"),
    "an unknown key of a strategy": ("split =", "spilt =", "[[strategies]] number 2 has no key 'spilt'; did you mean 'split'?"),
    "two of one name": ('"again"', '"relaunch"', "two strategies have the name 'relaunch'"),
    "an interval that is none": ('"2min"', '"often"', "[job]: save_every must be a number of steps, a time such as 20min, or one of best, "),
    "nothing that fails": ('[[failures]]\nlevel = "worker"\nmean_s = "1h"', "", "there must be either [[failures]] or [trace]"),
    "a trace without a span": ('[[failures]]\nlevel = "worker"\nmean_s = "1h"', '[trace]\npath = "table.csv"\nkind = "table"', "table.csv does not say how long its machines were observed: give span_s, at least 61 s, "),
    "a level that is none": ('"worker"', '"city"', "level must be one of worker, node, rack, got 'city'"),
    "a distribution that is none": ('mean_s = "1h"', 'mean_s = 1\ndistribution = "weibul"', "distribution must be one of constant, "),
    "a shape that is missing": ('mean_s = "1h"', 'mean_s = 1\ndistribution = "weibull"', "besides mean_s, weibull takes shape; got nothing"),
    "a count without a span": ('mean_s = "1h"', "count = 4", "[[failures]] number 1 has a count: it needs span_s"),
    "a job without an end": ("steps = 3600", "", "[job] needs steps, work_s"),
    "a step that is said twice": ("step_s =", 'slice_s = "1s"\nstep_s =', "[costs] has both step_s and slice_s"),
    "a speed without a size": ("step_s =", 'write_bytes_per_s = "1GB/s"\nstep_s =', "needs both state_bytes and write_bytes_per_s"),
    "no report": ("step_s =", 'from_report = "nowhere"\nstep_s =', "nowhere/report.json; run `holdfast run --report"),
    "more time than there is": ("steps = 3600", 'work_s = "1e200d"', "work_s must be at least 0 and at most 1e+09, got 8.64e+204"),
    "more steps than can be counted": ("steps = 3600", f"steps = {10**30}", "steps must be at least 1 and at most 1e+11, got 1e+30"),
    "more sums than can be counted": ("steps = 3600", f"steps = 3600\nbuckets = {10**30}", "buckets must be at least 1 and at most 1e+06, got 1e+30"),
    "a step of no time": ('steps = 3600\nsave_every = "2min"\n[costs]\nstep_s = "1s"', 'work_s = "1d"\n[costs]\nstep_s = 1e-300', "work_s is more than 1e+11 steps of "),
    "a number that no float holds": ("workers = 8", f"workers = {10**400}", "workers must be at least 1 and at most 1e+07, got 10000"),
    "failures without a pause": ('mean_s = "1h"', "mean_s = 1e-300", "a failure every "),
    "brackets without end": ("[cluster]", f"a = {'[' * 100_000}\n[cluster]", "is not TOML: its brackets are nested too deep"),
    "tables without end": ("[cluster]", f"a = {'{a = ' * 100_000}\n[cluster]", "is not TOML: its brackets are nested too deep"),
    "no TOML": ("[cluster]", "[cluster", "is not TOML: "),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_in_one_line_with_its_place(what, tmp_path, capsys):
    old, new, message = BAD[what]
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    (tmp_path / "table.csv").write_text("unit,start_s,end_s\na,61,62\n")

    code = holdfast("simulate", path)

    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.startswith(f"error: {path}")
    assert message in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.toml"], "cannot read no.toml: No such file"),
        (["SCENARIO", "--repetitions", "1"], "--repetitions must be at least 2"),
        (["SCENARIO", "--seed", "-1"], "--seed"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(words, message, tmp_path, capsys):
    path = written(tmp_path, GOOD)

    code = holdfast("simulate", *[path if word == "SCENARIO" else word for word in words])

    said = capsys.readouterr()
    assert code == 2
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_without_what_the_lab_needs_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)

    with pytest.raises(ConfigError, match=r"pydantic, which is not installed: pip install 'holdfast\[lab\]'"):
        read_scenario(EXAMPLES[0])
