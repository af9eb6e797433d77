"""Applications that are built again in the same process, with virtual workers."""

import functools
import gc
import weakref

import pytest
import torch
from planned import faults
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine.reinit_context import application
from holdfast.errors import ConfigError, ScriptError, Unwind
from holdfast.observe.report_text import happenings
from holdfast.records.files import read_run
from holdfast.records.types import Recovered, Reinitialised
from holdfast.recovery import Reinit
from holdfast.recovery.messages import LOADING, CatchUp, LoadCheckpoint, Progress, ProgressKnown, Reinitialise
from holdfast.summary.build import build_report

STEPS = 6
"""Of one loop."""


class Script:
    """A script whose model has everything that a snapshot must hold; it draws its data without a seed of its own."""

    def __init__(self, loops=1, stop_at=-1, **settings):
        self.settings = {"workers": 4, "slices": 4, "total_steps": STEPS * loops, **settings}
        self.loops, self.stop_at = loops, stop_at
        self.models = []
        self.still_there = []

    def main(self):
        gc.collect()
        self.still_there.append([model() is not None for model in self.models])
        x = torch.randn(24, 3)
        data = TensorDataset(x, (x.sum(1) > 0).long())
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.models.append(weakref.ref(model))
        session = holdfast.Session(model, optimizer, scheduler=scheduler, **self.settings)
        for _ in range(self.loops):
            for step in session.steps(data, 8, 2):
                for a, b in step:
                    step.backward(F.cross_entropy(model(a), b))
                if step.number == self.stop_at:
                    step.stop()
        self.account = session._job.loops.totals
        return session.step, session._job.loops.finished[0].state_sha256

    def run(self):
        torch.manual_seed(7)
        return holdfast.reinit(self.main)


# -- what is decided


def known(*completed):
    return ProgressKnown({rank: Progress(c, computed=True) for rank, c in enumerate(completed)}, 2)


@pytest.mark.parametrize(
    ("completed", "orders"),
    [
        ((4, 4), [Reinitialise(), LoadCheckpoint()]),
        ((4, 5), [Reinitialise(), LoadCheckpoint()]),
        ((5, 6), [CatchUp(1), Reinitialise(), LoadCheckpoint()]),
        ((LOADING, 6), [LoadCheckpoint()]),
    ],
)
def test_who_did_not_close_a_step_catches_up_and_who_loads_has_a_new_application_already(completed, orders):
    assert Reinit().handle(known(*completed)) == orders


# -- the bits


@functools.cache
def undisturbed(loops, stop_at=-1):
    script = Script(loops, stop_at)
    return script.run(), script.account


@pytest.mark.parametrize("source", ["own", "root", "checkpoint"])
def test_the_bits_are_those_of_the_undisturbed_run_and_the_old_application_is_gone(tmp_path, source):
    loops = 2
    script = Script(
        loops,
        strategy="reinit",
        reinit_from=source,
        checkpoint_dir=str(tmp_path / "ckpt"),
        checkpoint_every=5,
        run_dir=str(tmp_path),
        faults=faults(
            "kill:rank=1,step=3",
            f"kill:rank=0,step={STEPS * loops - 3},phase=allreduce",
            f"kill:rank=2,step={STEPS * loops - 1},phase=optimizer",
        ),
    )
    (tmp_path / "beacons").mkdir(exist_ok=True)

    assert (script.run(), script.account) == undisturbed(loops)
    assert (script.account.committed, script.account.repeated) == (24 * 2 * loops, 0)
    assert script.still_there == [[], [False], [False, False], [False, False, False]]
    records = read_run(tmp_path)
    redone = [r.redone_steps for r in records if isinstance(r, Recovered) and r.rank == 3]
    last = STEPS * loops
    assert redone == ([1, 1, 0] if source != "checkpoint" else [4, (last - 3) % 5 + 1, last % 5])
    told = [(r.source, r.form) for r in records if isinstance(r, Reinitialised) and r.rank == 3]
    assert told == [(source, "survivors")] * 3 or source == "checkpoint"


def test_without_a_checkpoint_training_begins_again():
    script = Script(strategy="reinit", reinit_from="checkpoint", faults=faults("kill:rank=1,step=4"))

    assert (script.run(), script.account) == undisturbed(1)


def test_a_stop_that_was_asked_for_in_a_closed_step_is_not_forgotten():
    """Nobody asks again: the step is not done again. Nor is a snapshot of this loop taken for one of the next."""
    for loops in (1, 2):
        kill = faults("kill:rank=1,step=3,phase=optimizer")
        script = Script(loops, stop_at=3, strategy="reinit", faults=kill)

        assert (script.run(), script.account) == undisturbed(loops, 3)
    assert undisturbed(1, 3)[0][0] == 4


def test_who_fills_the_place_of_the_dead_is_said(tmp_path):
    script = Script(
        strategy="reinit", workers=3, slices=3, spares=1, faults=faults("kill:rank=1,step=3", "kill:rank=0,step=5"),
        run_dir=str(tmp_path),
    )  # fmt: skip
    (tmp_path / "beacons").mkdir(exist_ok=True)

    script.run()

    report = build_report(read_run(tmp_path), started=range(3), wall_s=1.0, seed=0)
    assert [r["form"] for r in report["reinitialised"]] == ["replaced", "survivors"]
    told = [what for _, what in happenings(report)]
    assert told[0].startswith(
        "3 workers reinitialised (with failed workers replaced) and resumed at step 3 from each worker's own"
    )
    assert told[1].startswith(
        "2 workers reinitialised (the survivors alone) and resumed at step 5 from each worker's own"
    )


# -- scripts that cannot work


def linear(**settings):
    model = nn.Linear(3, 2)
    return holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_a_script_that_nobody_would_call_again_is_told_so():
    with pytest.raises(ScriptError, match=r"end it with holdfast\.reinit\(main\)"):
        linear(strategy="reinit")


def test_a_second_session_is_refused():
    with pytest.raises(ScriptError, match=r"one holdfast\.Session in main, and this is the second"):
        holdfast.reinit(lambda: [linear(strategy="reinit"), linear(strategy="reinit")])


def test_a_model_that_is_split_is_built_again_from_a_checkpoint_only():
    def main():
        holdfast.Session(holdfast.Sharded(nn.Linear(3, 2)), torch.optim.Adam, strategy="reinit")

    with pytest.raises(ConfigError, match="reinit_from must be checkpoint for a Pipeline or Sharded model, got own"):
        holdfast.reinit(main)


def test_a_main_that_swallows_what_unwinds_it_is_told_so():
    script = Script(strategy="reinit", faults=faults("kill:rank=1,step=3"))

    def main():
        try:
            script.main()
        except BaseException as error:
            assert isinstance(error, Unwind)  # noqa: PT017

    with pytest.raises(ScriptError, match="main caught holdfast's Unwind"):
        holdfast.reinit(main)
    assert application.job is None


def test_under_another_strategy_main_is_called_once():
    script = Script(faults=faults("kill:rank=1,step=3"))

    assert (script.run(), script.account) == undisturbed(1)
    assert script.still_there == [[]]
