"""The overlapped optimizer: buckets are updated as their sums come in, and taken back if their step is not closed."""

import functools
import json
import threading

import planned
import pytest
import reference
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from train_reference import train

import holdfast
from holdfast.base.clock import SystemClock
from holdfast.errors import ConfigError
from holdfast.integrity.fingerprint import RotatingDigest
from holdfast.models.gradients import BucketLayout
from holdfast.models.overlap import OverlappedOptimizer, UndoCopy
from holdfast.models.training_state import state_sha256
from holdfast.observe.terminal.table import summary_lines
from holdfast.records.files import read_run
from holdfast.state.context import OverlapCost
from holdfast.summary.build import build_report

KINDS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Branches(nn.Module):
    """One of its layers has a gradient in every third step only."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 37), nn.Linear(37, 37), nn.Linear(37, 3)
        self.forwards = 0

    def forward(self, x, *, rarely):
        x = F.relu(self.first(x))
        return self.last(self.rare(x) if rarely else x)


def train_branches(kind, *, overlap_optimizer=False, **settings):
    """Train; return the session, and the sha256 of all of its state."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = KINDS[kind](model.parameters())
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    schedule = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    settings = {"workers": 3, "bucket_bytes": 600, "overlap_optimizer": overlap_optimizer} | settings
    session = holdfast.Session(model, optimizer, scheduler=schedule, **settings)
    for step in session.steps(TensorDataset(x, (x.sum(1) > 0).long()), 8):
        for a, b in step:
            step.backward(F.cross_entropy(model(a, rarely=step.number % 3 == 1), b))
    return session, state_sha256(model, optimizer)


@functools.cache
def undisturbed(kind):
    return train_branches(kind)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_one_by_one_have_the_bits_of_the_whole_step(kind):
    session, bits = train_branches(kind, overlap_optimizer=True)

    assert bits == undisturbed(kind)
    assert session._trainable.overlapped.spent.buckets == 8 * len(session._trainable.buckets)


PHASES = ("backward", "allreduce", "allreduce,bucket=1", "allreduce,bucket=4", "optimizer")


@pytest.mark.parametrize(
    ("phase", "kind", "strategy"),
    [*((phase, "adam", "rollback") for phase in PHASES), ("allreduce,bucket=1", "momentum", "restart")],
)
def test_whenever_somebody_dies_the_bits_are_those_of_the_default(kind, strategy, phase):
    """Also in the first step, before which the optimizer has no state; bucket 4 is the last."""
    faults = planned.faults(f"kill:rank=1,step=0,phase={phase}", f"kill:rank=0,step=4,phase={phase}")

    session, bits = train_branches(kind, overlap_optimizer=True, strategy=strategy, faults=faults)

    assert len(session._trainable.buckets) == 5
    assert bits == undisturbed(kind)
    undone = {"allreduce,bucket=1": 2 * 2, "allreduce,bucket=4": 2 * 5}
    assert session._trainable.overlapped.spent.undone == undone.get(phase, 0)


def test_forward_keeps_the_updates_of_what_was_summed():
    faults = {"strategy": "forward", "faults": planned.faults("kill:rank=1,step=4,phase=allreduce,bucket=1")}

    session, bits = train_branches("momentum", overlap_optimizer=True, **faults)

    assert bits == train_branches("momentum", **faults)[1]
    assert session._trainable.overlapped.spent.undone == 0


def test_workers_with_weights_of_their_own_have_the_same_bits_too():
    faults = planned.faults("flip:rank=1,step=2,target=weights,bits=20,count=3")

    session, bits = train_branches("momentum", overlap_optimizer=True, guard="warn", faults=faults)

    other, expected = train_branches("momentum", guard="warn", faults=faults)
    assert bits == expected
    sha256s = [s._trainable.sha256s((0, 1, 2)) for s in (session, other)]
    assert sha256s[0] == sha256s[1]
    assert sha256s[0][0] != sha256s[0][1], "the flip did not strike"


def test_without_the_undo_the_bits_are_others(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(UndoCopy, "put_back", UndoCopy.forget)
    faults = planned.faults("kill:rank=1,step=4,phase=allreduce,bucket=0")

    _, bits = train("cnn", "adam", workers=4, overlap_optimizer=True, faults=faults)

    assert bits != reference.train("cnn", "adam")


@pytest.mark.parametrize("beside", [True, False])
def test_an_update_is_taken_back_to_the_bit_and_its_memory_is_used_again(beside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    optimizer = KINDS["adam"](model.parameters())
    buckets = BucketLayout(model, 100)
    eager = OverlappedOptimizer(buckets, optimizer, SystemClock(), OverlapCost(), beside=beside)
    results = [torch.rand(layout.length) + 0.5 for layout in buckets.layouts]
    assert len(results) == 4

    def update():
        for bucket, result in enumerate(results):
            eager.update(bucket, result)
        eager.wait()
        return state_sha256(model, optimizer)

    before = state_sha256(model, optimizer)
    after = update()
    eager.undo()
    assert state_sha256(model, optimizer) == before != after
    assert not optimizer.state, "what the optimizer had nothing of, it has nothing of again"
    assert update() == after
    eager.keep()
    twice = update()
    memory = {place: room.data_ptr() for copy in eager._copies for place, room in copy._room.items()}
    eager.undo()
    assert state_sha256(model, optimizer) == after
    assert update() == twice

    assert all(p.grad is None for p in model.parameters())
    assert memory == {place: room.data_ptr() for copy in eager._copies for place, room in copy._room.items()}
    assert eager.size_bytes == 4 * (4 * 180) + 4 * 4, "a parameter, three numbers each of amsgrad, and the step of each"
    assert (eager.spent.steps, eager.spent.undone) == (1, 2 * len(results))


def test_an_update_that_has_yet_to_begin_is_waited_for_before_it_is_taken_back():
    torch.manual_seed(0)
    model = nn.Linear(9, 9)
    optimizer = KINDS["adam"](model.parameters())
    eager = OverlappedOptimizer(BucketLayout(model, 100), optimizer, SystemClock(), OverlapCost(), beside=True)
    before, gate = state_sha256(model, optimizer), threading.Event()
    held = eager._thread.submit(gate.wait, 10)
    for bucket, layout in enumerate(eager._buckets.layouts):
        eager.update(bucket, torch.rand(layout.length) + 0.5)

    threading.Timer(0.05, gate.set).start()
    eager.undo()

    assert held.result(10)
    eager._thread.shutdown()
    assert state_sha256(model, optimizer) == before


def test_updates_beside_the_sums_are_done_before_replicas_are_compared(monkeypatch):
    """With a thread, as real workers have it, and a death between two updates."""
    torch.manual_seed(0)
    running, of_step = [], RotatingDigest.of_step

    def look(digest, *words):
        running.append(len(session._trainable.overlapped._running))
        return of_step(digest, *words)

    monkeypatch.setattr(RotatingDigest, "of_step", look)
    model = reference.make_model("cnn")
    optimizer = reference.make_optimizer("adam", model)
    faults = planned.faults("kill:rank=1,step=3,phase=allreduce,bucket=0")
    session = holdfast.Session(
        model, optimizer, workers=4, overlap_optimizer=True, seed=7, bucket_bytes=4096, faults=faults
    )
    session._trainable.overlap_optimizer(SystemClock(), OverlapCost(), beside=True)
    for step in session.steps(TensorDataset(*reference.data()), reference.BATCH, reference.EPOCHS):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))

    assert state_sha256(model, optimizer) == reference.train("cnn", "adam")
    assert running
    assert not any(running)
    assert session._trainable.overlapped.spent.undone == 1


def test_an_optimizer_that_raises_beside_the_sums_is_heard_of():
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    eager = OverlappedOptimizer(BucketLayout(model, 400), optimizer, SystemClock(), OverlapCost(), beside=True)
    optimizer.param_groups[0]["lr"] = "much"

    eager.update(0, torch.ones(eager._buckets.layouts[0].length))

    with pytest.raises(TypeError):
        eager.keep()


class Own(optim.SGD):
    """Known to nobody."""


def hooked(parameters):
    optimizer = optim.SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


PLAIN = {"model": nn.Linear(3, 2), "kind": optim.SGD}
REFUSED = {
    "a scaler": ({"scaler": torch.amp.GradScaler("cpu")}, "a scaler checks all gradients before"),
    "clipping": ({"clip_grad_norm": 1.5}, r"clip_grad_norm=1\.5 needs the norm of all gradients"),
    "another optimizer": ({"kind": Own}, "only plain SGD, Adam, AdamW, Adagrad, RMSprop .* got Own"),
    "one with hooks": ({"kind": hooked}, "got SGD with hooks, or a step of its own"),
    "a model that is split": ({"model": holdfast.Sharded(nn.Linear(3, 2))}, "needs a replicated model, got a Sharded"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_sums_first_is_refused(what):
    given, message = REFUSED[what]
    arguments = PLAIN | given
    model, kind = arguments.pop("model"), arguments.pop("kind")
    optimizer = kind(model.parameters()) if isinstance(model, nn.Module) else kind

    with pytest.raises(ConfigError, match=f"overlap_optimizer .*{message}"):
        holdfast.Session(model, optimizer, overlap_optimizer=True, **arguments)


def test_the_report_says_what_undo_took(tmp_path):
    faults = planned.faults("kill:rank=1,step=4,phase=allreduce,bucket=1")
    session, _ = train_branches("adam", overlap_optimizer=True, faults=faults, run_dir=str(tmp_path))

    report = build_report(read_run(tmp_path), started=range(3), wall_s=1.0, seed=0)

    (said,) = json.loads(json.dumps(report["optimizer_overlap"]))
    assert report["overlap_optimizer"] is True
    assert (said["rank"], said["steps"], said["buckets"], said["undone"]) == (0, 8, 8 * 5 + 2, 2)
    assert said["copy_bytes"] == session._trainable.overlapped.size_bytes > 0
    assert said["copy_s"] > 0
    assert said["update_s"] > 0
    assert said["undo_s"] > 0
    (line,) = [line for line in summary_lines(report) if line.startswith("update")]
    assert "overlapped: undo copies of" in line
    assert "; 2 buckets rolled back in" in line
