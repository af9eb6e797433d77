"""A newcomer follows the training before it joins: the bits stay those of a run that nothing happened to."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import train_catching_up
from jobs import exit_codes, run_report

from holdfast.models.training_state import model_sha256

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

SCRIPT = Path(train_catching_up.__file__)
WEIGHT_BYTES = 4 * train_catching_up.WIDTH**2
"""Of the largest tensor; the weights, their average and two optimizer tensors have that many each."""


@functools.cache
def undisturbed():
    return model_sha256(train_catching_up.train(workers=3, slices=3, fabric="virtual"))


def run(tmp_path, *words, least="0"):
    return run_report(
        tmp_path,
        *("--fabric", "gloo", "-n", 3, "--slices", 3, "--respawn", "--inject", "kill:rank=1,step=3"),
        *(SCRIPT, *words),
        timeout=240,
        env={"HOLDFAST_CATCH_UP_BYTES": least},
    )


def of(report, kind):
    return [event for event in report["_events"] if event["event"] == kind]


def check_same(report):
    assert report["outcome"] == "done"
    assert report["replicas"]["identical"] is True
    assert report["replicas"]["sha256"] == undisturbed()


def test_only_what_differs_is_sent_while_the_others_wait(tmp_path):
    report = run(tmp_path)

    check_same(report)
    assert exit_codes(report) == {0: 0, 1: -9, 2: 0, 3: 0}
    (followed,) = of(report, "CaughtUp")
    assert followed["why"] == ""
    assert followed["steps"] >= 1
    assert followed["received_bytes"] > 5 * WEIGHT_BYTES
    assert followed["sent_bytes"] < WEIGHT_BYTES
    assert {tuple(event["caught_up"]) for event in of(report, "Recovered") if event["joined"]} == {(3,)}


def test_a_wrong_bit_in_the_state_that_it_received_is_found_and_mended(tmp_path):
    report = run(tmp_path, "flip", tmp_path / "marker")

    check_same(report)
    assert (tmp_path / "marker").exists()
    (followed,) = of(report, "CaughtUp")
    assert followed["why"] == ""
    assert WEIGHT_BYTES < followed["sent_bytes"] < 3 * WEIGHT_BYTES  # that of the weight, and of its average


@pytest.mark.parametrize(
    ("victim", "codes"),
    [("giver", {0: 0, 1: -9, 2: -9, 3: 0, 4: 0}), ("newcomer", {0: 0, 1: -9, 2: 0, 3: -9, 4: 0})],
)
def test_one_of_the_two_dies_in_the_middle(tmp_path, victim, codes):
    report = run(tmp_path, victim, tmp_path / "marker")

    check_same(report)
    assert exit_codes(report) == codes
    assert {event["rank"]: event["why"] for event in of(report, "CaughtUp")} == {
        rank: "" for rank in (3, 4) if codes[rank] == 0
    }
