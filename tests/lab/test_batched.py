"""All slices at once against slice by slice: the same decisions, the same weights but for float error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.errors import ConfigError, JobError, TooFewWorkers
from holdfast.faults.plan import FaultPlan, parse
from holdfast_lab.virtual_ddp.training import MembershipChange, MembershipDecision, VirtualDdp

WORKERS, SAMPLES, BATCH, EPOCHS = 8, 200, 32, 2

KILLS = ("kill:rank=1,step=2,phase=allreduce,bucket=1", "kill:rank=6,step=2,phase=allreduce,bucket=2",
         "kill:rank=0,step=5", "kill:rank=3,step=9,phase=allreduce,bucket=3", "kill:rank=7,step=10,phase=optimizer")  # fmt: skip


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 12, generator=generator)
    return TensorDataset(x, (x[:, :4] + 0.3 * torch.randn(SAMPLES, 4, generator=generator)).argmax(1))


def made(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network with nothing random in it, and no batch norm: only the order of additions can differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(kind: Any, dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[torch.Tensor, Any]:
    """Train by a session or by batched workers; return all weights, and what trained them."""
    kills = settings.pop("kills", ())
    before_step = settings.pop("before_step", lambda trainer: None)
    faults = FaultPlan(tuple(map(parse, kills))).to_json() if kills else ""
    model, optimizer = made(dtype)
    fabric = {"fabric": "virtual"} if kind is holdfast.Session else {}
    trainer = kind(model, optimizer, workers=WORKERS, faults=faults, bucket_bytes=1, seed=3, **fabric, **settings)
    for step in trainer.steps(data(), BATCH, EPOCHS):
        before_step(trainer)
        for x, y in step:
            step.backward(F.cross_entropy(model(x.to(dtype)), y))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), trainer


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "rollback"},
        {"strategy": "rollback", "batch": "local", "rescale": "original"},
        {"strategy": "forward"},
        {"strategy": "forward", "batch": "local", "rescale": "original", "slices": 16},
        {"strategy": "forward", "split": "even"},
        {"strategy": "restart"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_all_slices_at_once_end_where_slice_by_slice_does(settings):
    exact, session = train(holdfast.Session, kills=KILLS, **settings)
    weights, batched = train(VirtualDdp, kills=KILLS, **settings)

    # float64 has 53 bits: some 20 steps and sums of 32 terms leave a dozen of them wrong at most.
    assert apart(weights, exact) < 2**-40
    assert batched.step == session.step
    assert batched.account() == session._job.loops.totals
    assert batched.members == session._job.comm.members == (2, 4, 5)


def test_what_forward_loses_is_what_the_dead_had_not_given_yet():
    """The negative control: each of these would pass for the other if a failure did nothing here."""
    undisturbed, _ = train(VirtualDdp, strategy="forward")
    early, _ = train(VirtualDdp, strategy="forward", kills=["kill:rank=1,step=2"])
    half, _ = train(VirtualDdp, strategy="forward", kills=["kill:rank=1,step=2,phase=allreduce,bucket=2"])
    done, _ = train(VirtualDdp, strategy="forward", kills=["kill:rank=1,step=2,phase=allreduce,bucket=5"])

    assert apart(early, undisturbed) > 1e-3
    assert apart(half, undisturbed) > 1e-3
    assert apart(half, early) > 1e-3
    assert apart(done, undisturbed) < 2**-40  # all sums were in


def test_restart_goes_back_to_the_newest_checkpoint_that_was_stable():
    """Slice by slice it does so with files; here the state is in memory, and the weights after it are the same."""
    undisturbed, _ = train(VirtualDdp, strategy="restart", checkpoint_every=3)
    kills = ["kill:rank=1,step=5", "kill:rank=2,step=9", "kill:rank=4,step=9,phase=allreduce,bucket=0"]

    weights, batched = train(VirtualDdp, strategy="restart", checkpoint_every=3, kills=kills)

    assert torch.equal(weights, undisturbed)
    # That of step 9 is not stable before the first sum of step 9: all go back to that of 6, and the second time to that of 9.
    assert batched.decisions == [
        MembershipDecision(5, "load", 3),
        MembershipDecision(9, "load", 4),
        MembershipDecision(9, "load", 1),
    ]
    assert (batched.account().lost, batched.account().repeated) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "begin"),
    [
        ({"strategy": "rollback"}, 5),
        ({"strategy": "forward", "batch": "local", "rescale": "original"}, 5),
        ({"strategy": "restart", "checkpoint_every": 2}, 4),
        ({"strategy": "restart", "checkpoint_every": 3}, 3),
    ],
    ids=lambda settings: str(settings),
)
def test_what_begins_where_the_undisturbed_training_was_ends_as_the_whole_does(settings, begin):
    kills = ["kill:rank=1,step=6", "kill:rank=2,step=9,phase=allreduce,bucket=2"]
    kept = {}
    train(VirtualDdp, before_step=lambda training: kept.setdefault(training.step, training.snapshot()))

    whole, disturbed = train(VirtualDdp, kills=kills, **settings)
    weights, batched = train(VirtualDdp, kills=kills, begin=kept[begin], **settings)

    assert torch.equal(weights, whole)
    assert batched.decisions == disturbed.decisions
    assert len(batched.decisions) == 2
    assert batched.account() == disturbed.account()


def test_who_leaves_and_who_comes_as_planned_cost_no_sample_and_no_step():
    undisturbed, _ = train(VirtualDdp)
    changes = (MembershipChange(step=1, leave=(2, 5)), MembershipChange(step=9, join=(8, 9)))

    weights, batched = train(VirtualDdp, changes=changes)
    local, shrunk = train(VirtualDdp, changes=changes, batch="local")

    assert torch.equal(weights, undisturbed)
    assert batched.decisions == [MembershipDecision(1, "leave", 0), MembershipDecision(9, "grow", 0)]
    assert batched.members == (0, 1, 3, 4, 6, 7, 8, 9)
    assert apart(local, undisturbed) > 1e-3
    assert shrunk.step > batched.step  # eight steps were smaller


def test_too_few_workers_stop_and_nobody_is_not_enough():
    with pytest.raises(TooFewWorkers, match="3 of at least 4 workers are left in step 9"):
        train(VirtualDdp, kills=["kill:rank=0,step=9", *(f"kill:rank={rank},step=9" for rank in range(1, 5))], min_workers=4)  # fmt: skip
    with pytest.raises(JobError, match="every worker has failed in step 3"):
        train(VirtualDdp, kills=[f"kill:rank={rank},step=3" for rank in range(WORKERS)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "partial"}, "strategy must be one of rollback, forward, restart where all slices"),
        ({"changes": (MembershipChange(step=1, leave=(2,)), MembershipChange(step=1, leave=(3,)))}, "at most one change is allowed before a step, got 2 for 1 steps"),
        ({"kills": ["slow:rank=1,step=2,seconds=1"]}, "only kills in forward, backward, allreduce and optimizer are possible"),
        ({"kills": ["kill:rank=9,step=2"]}, "rank must be"),
        ({"kills": ["kill:rank=1,step=2,phase=allreduce,bucket=9"]}, "bucket must be"),
    ],
)  # fmt: skip
def test_what_it_cannot_play_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        train(VirtualDdp, **settings)
