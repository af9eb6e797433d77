"""Rehearsing failures of a training: what is tried, what is chosen, and that it can be pasted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.setting_choices import MIRROR_CODECS, MIRROR_PREDICTORS
from holdfast_lab.studies import rehearsal
from holdfast_lab.studies.rehearsal import Rehearsal, rehearse

SCRIPT = Path(rehearsal.__file__).parent / "scar" / "workers" / "shards.py"


def settings_of(options):
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    return {name.removeprefix("--").replace("-", "_"): value for name, value in pairs.items()}


def test_every_predictor_is_tried_with_every_codec_as_a_run_takes_it():
    ways = [settings_of(way) for way in Rehearsal(script=SCRIPT, workers=4, every=8, fraction=0.25).ways()]

    assert {(way["mirror_predictor"], way["mirror_codec"]) for way in ways} == {
        (predictor, codec) for predictor in MIRROR_PREDICTORS for codec in MIRROR_CODECS
    }
    for way in ways:
        made = Settings.from_env({f"HOLDFAST_{name.upper()}": value for name, value in way.items()})
        assert (made.strategy, made.mirror_every, made.mirror_fraction) == ("partial", 8, 0.25)


def test_who_dies_when_is_drawn_by_the_seed_between_a_whole_copy_and_half_of_the_run():
    deaths = Rehearsal(script=SCRIPT, workers=4, failures=200, seed=1).deaths(60)

    assert {rank for rank, _ in deaths} == {0, 1, 2, 3}
    assert {step for _, step in deaths} == set(range(16, 30))
    assert Rehearsal(script=SCRIPT, workers=4, failures=200, seed=1).deaths(60) == deaths
    assert Rehearsal(script=SCRIPT, workers=4, failures=200, seed=2).deaths(60) != deaths
    with pytest.raises(ConfigError, match=r"needs a training of more than 33 steps, .* got 33"):
        Rehearsal(script=SCRIPT, workers=4).deaths(33)


def test_a_script_that_is_not_there_is_refused_before_anything_is_run(tmp_path):
    said: list[str] = []

    with pytest.raises(ConfigError, match=r"there is no script '.*gone\.py'"):
        rehearse(Rehearsal(script=tmp_path / "gone.py", workers=4), said.append)

    assert said == []


@pytest.mark.parametrize(("wrong", "message"), [
    ({"limit_s": 0.0}, "--run-timeout must be a number of seconds above 0, got 0"),
    ({"limit_s": float("nan")}, "--run-timeout must be a number of seconds above 0, got nan"),
    ({"metric": ""}, "--metric must be the name of the loss"),
    ({"fraction": 2.0}, "fraction"),
])  # fmt: skip
def test_a_wrong_number_is_refused_before_anything_is_run(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Rehearsal(script=SCRIPT, workers=4, **wrong)


def test_a_metric_that_the_script_does_not_log_is_refused_after_the_first_run(monkeypatch):
    ran = []
    monkeypatch.setattr(rehearsal, "_run", lambda this, folder, *words: ran.append(words) or {"steps_planned": 100})

    with pytest.raises(ConfigError, match=r"must hold report\.json and events\.jsonl"):
        rehearse(Rehearsal(script=SCRIPT, workers=4), lambda line: None)

    assert len(ran) == 1


def pretend(monkeypatch, cost):
    """Let no run take place; its cost is a function of predictor, codec and the death."""
    ran = {}

    def run(this, folder, *words):
        ran[folder] = words
        return {"steps_planned": 100}

    def against(folder, undisturbed, metric):
        assert ran[undisturbed] == ()
        way = settings_of(ran[folder])
        return {"iterations": cost(way["mirror_predictor"], way["mirror_codec"], way["inject"]), "censored": 1}

    monkeypatch.setattr(rehearsal, "_run", run)
    monkeypatch.setattr(rehearsal, "cost_against", against)
    monkeypatch.setattr(rehearsal, "read_losses", lambda folder, metric: ({}, [1.0]))
    return ran


def test_the_way_of_the_least_mean_cost_comes_first_with_the_same_deaths_for_all(monkeypatch):
    this = Rehearsal(script=SCRIPT, workers=4, failures=3)
    specs = [f"kill:rank={rank},step={step},phase=optimizer" for rank, step in this.deaths(100)]
    costs = {"last": [9, 1, None], "line": [2, 4, None], "calibrated": [3, 5, None]}
    ran = pretend(monkeypatch, lambda predictor, codec, spec: costs[predictor][specs.index(spec)])

    tried = rehearse(this, lambda line: None)

    assert len(ran) == 1 + 3 * 6
    assert [settings_of(one.options)["mirror_predictor"] for one in tried[::2]] == ["line", "calibrated", "last"]
    assert (tried[0].costs, tried[0].cost, tried[0].censored) == ((2, 4), 3, 2)


def test_a_loss_that_tells_nothing_and_a_training_that_fails_are_said_in_one_line(monkeypatch, capsys, tmp_path):
    with monkeypatch.context() as patched:
        pretend(patched, lambda *_: None)
        with pytest.raises(
            ConfigError, match="after none of the failures does the loss fall by more than its noise; give more"
        ):
            rehearse(Rehearsal(script=SCRIPT, workers=4), lambda line: None)
    with pytest.raises(ConfigError, match=r"did not finish within 0.1 s: no output; to reproduce it: holdfast run"):
        rehearse(Rehearsal(script=SCRIPT, workers=4, limit_s=0.1), lambda line: None)
    (tmp_path / "fails.py").write_text("raise ValueError('no such thing')\n")

    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "-n", "2", str(tmp_path / "fails.py"), "--epochs", "1"])

    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rehearsal: run 1 of 19: undisturbed"
    assert "ended with exit status 93: ValueError: no such thing; to reproduce it: holdfast run -n 2 " in said[1]
    assert len(said) == 2


def test_what_is_chosen_can_be_pasted_into_a_run(capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "CODECS", rehearsal.CODECS[:1])  # all are among the ways that are tried, above
    monkeypatch.setattr(rehearsal, "PREDICTORS", rehearsal.PREDICTORS[:2])
    script = [SCRIPT, "--shards", 4, "--epochs", 3, "--batch", 64, "--optimizer", "adam", "--rate", 0.003]
    words = ["rehearse", "-n", 4, "--failures", 1, "--metric", "evaluation", *script]

    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])

    assert ended.value.code == 0, sys.stderr
    *_, options = capsys.readouterr().out.splitlines()
    again = ["run", "-n", 4, "--fabric", "virtual", *options.split(), *script]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in again])
    assert ended.value.code == 0
