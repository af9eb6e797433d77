from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import InternalError
from holdfast.faults.alteration import Alteration
from holdfast_lab.studies.base import MEASURED, Options
from holdfast_lab.studies.campaign_plan import found_by
from holdfast_lab.studies.soft_errors import study as soft_errors
from holdfast_lab.studies.soft_errors.cells import BIT_BY_BIT, COUNTS, CROSSED, NETWORKS, cells_of, experiments
from holdfast_lab.studies.soft_errors.claims import hold_claims
from holdfast_lab.studies.soft_errors.group import TrainingGroup
from holdfast_lab.studies.soft_errors.page import sections
from holdfast_lab.studies.soft_errors.rows import cell_row
from holdfast_lab.studies.soft_errors.setup import BELOW, CRITICAL, OPTIMIZER, PLATFORMS, SoftErrorCase, SoftErrorSetup
from holdfast_lab.studies.soft_errors.study import STUDY
from holdfast_lab.studies.soft_errors.trial import bits_of
from holdfast_lab.studies.soft_errors.workers import session as soft_session
from holdfast_lab.studies.soft_errors.workers.process import Disturbance, alter
from holdfast_lab.studies.soft_errors.workers.session import SessionProcess

TINY = SoftErrorSetup(platform="session", processes=2, limit=128, batch=32, restart=1, epochs=1)
MANY = Disturbance(how=Alteration(count=100, bits="0:29", seed=5))


def test_a_session_goes_back_to_the_same_bits_and_an_altered_worker_stays_another(tmp_path):
    process = SessionProcess(TINY, 0, tmp_path / "rank-0.h5")
    calm = process.begin()

    struck = process.go_on([None, MANY])
    again = process.go_on([None, None])

    assert [one["ended_with"] for one in again] == [one["ended_with"] for one in calm]
    assert calm[0]["ended_with"] == calm[1]["ended_with"]
    assert struck[0]["begun_with"] == calm[0]["begun_with"] != struck[1]["begun_with"]
    assert (struck[0]["flipped"], struck[1]["flipped"]) == (0, 100)
    # What one computed wrong is summed into the gradients of all, and only the altered one keeps the altered weights.
    assert len({struck[0]["ended_with"], struck[1]["ended_with"], calm[0]["ended_with"]}) == 3


def test_a_session_that_stops_or_heals_what_was_injected_would_make_trials_void(tmp_path, monkeypatch):
    process = SessionProcess(TINY, 0, tmp_path / "rank-0.h5")
    calm = process.begin()
    assert process.go_on([None, MANY])[1]["ended_with"] != calm[1]["ended_with"]

    for policy, what in (("stop", "stopped the training"), ("heal", "healed the alteration")):
        monkeypatch.setattr(soft_session, "GUARD", policy)
        with pytest.raises(InternalError, match=rf"a trial is void: the session's guard {what}"):
            process.go_on([None, MANY])


def test_a_void_trial_is_no_outcome_but_the_end_of_the_campaign(tmp_path):
    group = TrainingGroup(TINY)
    ours, theirs = multiprocessing.Pipe()
    group._connections.append(ours)  # as if its process had been started
    theirs.send([{"error": "InternalError: a trial is void", "trace": "", "is_ours": True}])

    with pytest.raises(InternalError, match="a trial is void"):
        found_by(lambda _, seed: group._answers(10.0)[seed], None, 0)
    group.close()


def test_what_is_altered_in_another_format_is_put_back_and_the_rest_keeps_its_bits():
    import torch

    tensor = torch.full((64,), 0.1)

    listed, count = alter({"model/x": tensor}, Alteration(count=1, bits="14", seed=1), "float16")

    changed = tensor != torch.full((64,), 0.1)
    assert (count, int(changed.sum())) == (1, 1)
    assert float(tensor[changed]) == float(torch.tensor(0.1, dtype=torch.float16)) * 2**16 == listed[0]["after"]


def test_bits_below_the_critical_one_are_those_of_the_format():
    found = {width: bits_of(BELOW, width) for width in ("float16", "bfloat16", "float32", "float64")}

    assert found == {"float16": "0:13", "bfloat16": "0:13", "float32": "0:29", "float64": "0:61"}
    assert bits_of(CRITICAL, "float16") == CRITICAL


def test_the_whole_design_has_cells_of_different_names_that_come_back_from_their_settings():
    base = SoftErrorSetup(platform="ddp", processes=1)
    large = replace(base, network="resnet18", size=16)

    parts = {name: pairs for _, name, pairs in experiments(base, PLATFORMS, 4, [large])}

    pairs = [pair for of_part in parts.values() for pair in of_part]
    cells = cells_of(pairs)
    assert len({cell.name for cell in cells}) == len(cells)
    assert [SoftErrorCase.from_settings(json.loads(json.dumps(cell.settings))) for cell in cells] == pairs
    assert {len(parts[f"{BIT_BY_BIT}: {width}"]) for width in ("float16", "float32", "float64")} == {16, 32, 64}
    altered = {
        (case.experiment, setup.platform, setup.processes): {c.altered for c, s in pairs if s == setup}
        for case, setup in pairs
    }
    assert altered[CROSSED, "hybrid", 4] == {1, 2, 4}
    assert altered[CROSSED, "pipeline", 3] == {1, 3}  # it has three blocks
    assert altered[COUNTS, "ddp", 8] == {1, 4, 8}
    assert {setup.network for case, setup in pairs if case.experiment == NETWORKS} == {"resnet18"}


def test_the_whole_study_has_every_network_on_every_data_set_and_marks_what_has_few_trials(monkeypatch):
    monkeypatch.setattr(soft_errors, "_found_in", lambda data: "fashion")
    study, options = STUDY, Options(out=Path(), data=Path("files"))

    names = [task.key for task in study.plan(options).tasks()]

    on = {f"networks: {network} on {data}" for network in soft_errors.NETWORKS for data in ("digits", "fashion")}
    assert on - {"networks: mlp on digits"} == {name for name in names if name.startswith("networks")}
    assert names[-2:] == ["alone", "explained"]
    assert "Trials of ResNets: 20 per cell, on 512 samples." in study.plan(options).left_out()
    assert (
        study.plan(options).settings()["trials per cell"],
        study.plan(options).settings()["trials per cell of large networks"],
    ) == (180, 20)
    some = replace(options, only=("ddp", "bursts"))
    assert [task.key for task in study.plan(some).tasks()] == ["bursts", "explained"]


# ---------------------------------------------------------------------------------------------
# Claims


def row(outcomes: dict[str, int], **case):
    """The row of a cell with so many trials of each outcome."""
    settings = SoftErrorCase(**{"experiment": CROSSED} | case).settings(replace(TINY, platform="ddp"))
    trials = [
        {"outcome": name, "accuracy": 0.9, "undisturbed": 0.9, "seconds": 1.0}
        for name, count in outcomes.items()
        for _ in range(count)
    ]
    return cell_row(settings, trials)


def claim(rows, words):
    return next(one for one in hold_claims(rows, 0) if one.claim.startswith(words))


@pytest.mark.parametrize(("harmed", "holds"), [(0, True), (5, None), (40, False)])
def test_dozens_of_flips_are_absorbed_if_the_interval_says_so(harmed, holds):
    rows = [row({"RWC": 90 - harmed // 2, "AccR": harmed // 2}, flips=10, bits=BELOW)]
    rows += [row({"RWC": 90 - harmed + harmed // 2, "NaN": harmed - harmed // 2}, flips=100, bits=BELOW)]

    found = claim(rows, "Dozens of flips")

    assert found.holds is holds
    assert found.ours == pytest.approx(100 * (180 - harmed) / 180)


@pytest.mark.parametrize(("finite", "holds"), [(0, True), (1, False)])
def test_every_run_ends_in_nan_only_if_every_one_does(finite, holds):
    found = claim([row({"NaN": 180 - finite, "AccR": finite}, flips=500)], "With 500")

    assert (found.holds, found.paper) == (holds, 100.0)


@pytest.mark.parametrize(("model", "holds"), [(90, True), (5, False)])
def test_the_model_is_more_sensitive_if_more_of_its_trainings_changed(model, holds):
    rows = [row({"RWC": 180 - model, "NaN": model}, flips=flips) for flips in (1, 10, 100)]
    rows += [row({"RWC": 150, "AccR": 30}, flips=flips, target=OPTIMIZER) for flips in (1, 10, 100)]

    found = claim(rows, "The model is more")

    assert found.holds is holds
    assert found.ours == pytest.approx(100 * (model - 30) / 180)


@pytest.mark.parametrize(("worst", "holds"), [(30, True), (29, False)])
def test_the_critical_bit_is_the_worst_or_it_is_said_which_is(worst, holds):
    rows = [
        row({"RWC": 80, "NaN": 100} if bit == worst else {"RWC": 180}, experiment=BIT_BY_BIT, bits=str(bit))
        for bit in range(32)
    ]

    found = claim(rows, "No bit does as much harm")

    assert (found.ours, found.paper) == (worst, 30)
    assert found.holds is holds


# ---------------------------------------------------------------------------------------------
# The study


def test_each_platform_of_the_crossed_design_has_a_figure_of_its_own():
    rows = [row({"RWC": 180}) | {"platform": platform, "status": MEASURED} for platform in ("ddp", "session")]

    figures = [section for section in sections(rows) if section["kind"] in ("intervals", "bars") and section["rows"]]

    assert [(figure["id"], [one["platform"] for one in figure["rows"]]) for figure in figures] == [
        ("crossed-ddp-harmed", ["ddp"]),
        ("crossed-ddp-outcomes", ["ddp"]),
        ("crossed-session-harmed", ["session"]),
        ("crossed-session-outcomes", ["session"]),
    ]
