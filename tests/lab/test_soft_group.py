"""Groups of real processes that train again and again: altered in memory or in their files, killed, and made anew."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from holdfast.faults.alteration import Alteration
from holdfast.tools.formats.kinds import open_imported
from holdfast_lab.inject.files import InjectionTarget
from holdfast_lab.inject.inject import inject
from holdfast_lab.studies.campaign_plan import found_by
from holdfast_lab.studies.outcomes import TF
from holdfast_lab.studies.soft_errors.alone import alone_row
from holdfast_lab.studies.soft_errors.group import GroupFailed, TrainingGroup
from holdfast_lab.studies.soft_errors.setup import BELOW, SoftErrorCase, SoftErrorSetup
from holdfast_lab.studies.soft_errors.trial import SoftErrorWarmStart, trial
from holdfast_lab.studies.soft_errors.workers.process import Disturbance

pytestmark = pytest.mark.chaos

TINY = {"processes": 2, "limit": 128, "batch": 32, "restart": 1, "epochs": 1}
BITS = Alteration(count=100, bits="0:29", seed=5)


@pytest.fixture(scope="module")
def replicated():
    group = TrainingGroup(SoftErrorSetup(platform="ddp", **TINY))
    group.begin()
    yield group
    group.close()


def ended(found):
    return [one["ended_with"] for one in found]


@pytest.mark.parametrize("target", ["model", "optimizer"])
def test_altering_the_state_in_memory_is_altering_the_file_of_the_process(replicated, target, tmp_path):
    file = tmp_path / "altered.h5"
    inject(InjectionTarget(Path(replicated.undisturbed[1]["file"])), BITS, at=[target], out=file)

    in_memory = replicated.ask([None, Disturbance(target=target, how=BITS)])
    from_file = replicated.ask([None, Disturbance(file=str(file))])

    assert in_memory[1]["flipped"] == 100
    assert in_memory[1]["begun_with"] == from_file[1]["begun_with"] != replicated.undisturbed[1]["begun_with"]
    assert ended(in_memory) == ended(from_file)


def test_a_replica_that_is_altered_after_wrapping_stays_another_and_the_next_trial_does_not_know(replicated):
    struck = replicated.ask([None, Disturbance(how=BITS)])
    calm = replicated.ask([None, None])

    assert len({*ended(struck), *ended(replicated.undisturbed)}) == 3
    assert ended(calm) == ended(replicated.undisturbed)


def test_trials_from_a_warm_state_find_what_trainings_in_processes_of_their_own_find(replicated):
    case = SoftErrorCase(experiment="tiny", flips=100, bits=BELOW)
    settings = case.settings(replicated.setup)
    warm = SoftErrorWarmStart(replicated, case)
    trials = [{"cell": "tiny", "number": seed, "seed": seed, **trial(warm, seed)} for seed in (3, 4)]

    row = alone_row(settings, trials)
    others = alone_row(settings, [trials[0] | {"seed": 5}])

    assert (row["trials"], row["equal"], row["first_difference"]) == (2, 2, "")
    assert others["equal"] == 0  # other bits, another training


def test_a_group_that_lost_a_process_is_made_anew_and_the_trial_is_the_same(replicated):
    warm = SoftErrorWarmStart(replicated, SoftErrorCase(experiment="tiny", flips=100, bits=BELOW))
    before = trial(warm, 7)

    os.kill(replicated.pids[1], signal.SIGKILL)
    after = trial(warm, 7)

    assert after == before


def test_a_group_that_does_not_answer_in_time_is_ended(replicated):
    replicated.begin()
    pids, replicated._limit_s = replicated.pids, 1.0
    os.kill(pids[0], signal.SIGSTOP)

    with pytest.raises(GroupFailed, match="did not answer within 1 s"):
        replicated.ask([None, None])

    assert replicated.pids == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_trial_that_fails_twice_is_a_training_that_failed(replicated):
    with pytest.raises(GroupFailed, match="nowhere"):
        replicated.ask([None, Disturbance(file="nowhere.h5")])
    assert replicated.pids == []

    found = found_by(trial, SoftErrorWarmStart(replicated, SoftErrorCase(experiment="tiny", flips=10**9)), 7)

    assert found["outcome"] == TF
    assert "must be at most" in found["error"]


def test_stages_of_a_pipeline_have_their_own_layers_and_one_is_altered_alone():
    with contextlib.closing(
        TrainingGroup(SoftErrorSetup(platform="pipeline", stages=2, network="cnn", **TINY))
    ) as group:
        group.begin()
        struck = group.ask([None, Disturbance(how=BITS)])
        calm = group.ask([None, None])
        with open_imported(Path(group.undisturbed[0]["file"])) as file:
            num_batches = int(file.read("model/conv2.1.num_batches_tracked"))

    convolutions = ["conv1.0", "conv1.1", "conv2.0", "conv2.1"]
    assert [one["layers"] for one in group.undisturbed] == [convolutions, ["layer1.1", "head"]]
    # Two pieces of each of four batches: torch has not looked for shapes by a pass that batch norms count, too.
    assert num_batches == 8
    assert ended(calm) == ended(group.undisturbed)
    assert struck[0]["begun_with"] == group.undisturbed[0]["begun_with"]
    assert struck[0]["ended_with"] != group.undisturbed[0]["ended_with"]  # through the gradients
    assert struck[0]["accuracy"] == struck[1]["accuracy"]
