"""Models that are not on the CPU, through every entry point: each trains there, or is refused in one line."""

import pytest
import torch
import torch.nn.functional as F
from elsewhere import META, HostReads, elsewhere
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from written_plans import plan

import holdfast
from holdfast import checkpoint
from holdfast.comm import MeanDivisor, OrderedAllReduce, SlotSpan, VirtualCommunicator
from holdfast.comm.fabrics.gloo import GlooFabric
from holdfast.distributed.group import HoldfastGroup
from holdfast.errors import CheckpointError, ConfigError

SAMPLES, BATCH, STEPS = 24, 8, 3
VIRTUAL = {"fabric": "virtual", "workers": 4, "slices": 4, "bucket_bytes": 64}


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.randint(0, 3, (SAMPLES,), generator=generator)
    )


def net(norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.Linear(8, 3)).to(META)


def on_fake_cuda():
    """A model whose parameters say that they are on a GPU; no operation on them works without one."""
    model = nn.Linear(4, 3)
    with FakeTensorMode() as mode, torch.no_grad():
        for name in ("weight", "bias"):
            fake = torch.empty(getattr(model, name).shape, device="cuda:0")
            setattr(model, name, nn.Parameter(fake))
    assert mode
    return model


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


# -- in front of the door: devices where nothing can be trained


def session_of(fabric):
    return lambda model: next(holdfast.Session(model, adam(model), fabric=fabric).steps(dataset(), BATCH))


def prepared(model):
    _, _, loader = holdfast.prepare(model, adam(model), DataLoader(dataset(), BATCH))
    next(iter(loader))


def pipeline(model):
    holdfast.Session(holdfast.Pipeline([model], F.cross_entropy), torch.optim.Adam)


def built_pipeline(model):
    session = holdfast.Session(holdfast.Pipeline([lambda: model], F.cross_entropy), torch.optim.Adam)
    next(session.steps(dataset(), BATCH))


def sharded(model):
    holdfast.Session(holdfast.Sharded(model), torch.optim.Adam)


def ddp(model):
    HoldfastGroup.__new__(HoldfastGroup).allreduce([next(model.parameters()).detach()])


def reinitialised(model):
    holdfast.reinit(lambda: session_of("virtual")(model))


DOORS = {
    "session": session_of(""),
    "session-virtual": session_of("virtual"),
    "session-gloo": session_of("gloo"),
    "session-ulfm": session_of("ulfm"),
    "prepare": prepared,
    "pipeline": pipeline,
    "pipeline-built": built_pipeline,
    "sharded": sharded,
    "ddp": ddp,
    "reinit": reinitialised,
}


def to_save(model):
    return {"model": {"weight": model.weight}}


SAVING = {
    "flatten": lambda model, _: checkpoint.flatten(to_save(model)),
    "take": lambda model, _: checkpoint.take(to_save(model)),
    "shard": lambda model, _: checkpoint.take({"model": {"weight": checkpoint.Shard(model.weight, (0, 0), (3, 4))}}),
    "write_tensors": lambda model, folder: checkpoint.write_tensors(str(folder), 1, to_save(model), {}),
    "store": lambda model, folder: checkpoint.CheckpointStore(str(folder), "safetensors").write_tensors(
        1, to_save(model), {}
    ),
}
"""The doors of checkpoints, which refuse a tensor without numbers in the words of checkpoints."""


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3, device="meta"), on_fake_cuda], ids=["meta", "fake-cuda"])
@pytest.mark.parametrize("door", SAVING)
def test_what_has_no_numbers_is_not_saved(door, make, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        SAVING[door](make(), tmp_path)

    assert str(refused.value).startswith("the state cannot be saved: model/weight ")
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a model on this GPU is not refused")
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3, device="meta"), on_fake_cuda], ids=["meta", "fake-cuda"])
@pytest.mark.parametrize("door", DOORS)
def test_where_nothing_can_be_trained_every_door_says_so_in_one_line(door, make):
    model = make()
    device = str(next(model.parameters()).device)

    with pytest.raises(ConfigError) as refused:
        DOORS[door](model)

    said = str(refused.value)
    assert device in said
    assert "cpu" in said.lower(), "what to do"
    assert "\n" not in said


# -- behind it: a device that is not the host, with the reads that make the host wait


def train(*, norm=nn.BatchNorm1d, compute=False, average=False, faults=(), **settings):
    """Train replicated; return where the host read numbers of the device, and how often."""
    model = net(norm)
    more = {"average": AveragedModel(model)} if average else {}
    if faults:
        more["faults"] = plan(*faults)
    session = holdfast.Session(model, adam(model), **(VIRTUAL | more | settings))
    with HostReads() as reads:
        for step in session.steps(dataset(), BATCH):
            if step.number == 0:
                reads.counts.clear()  # of the beginning
            if compute:
                step.compute(model, F.cross_entropy)
                continue
            for x, y in step:
                step.backward(F.cross_entropy(model(x.to(META)), y.to(META)))
            if step.number == STEPS - 1:
                counts = dict(reads.counts)
    assert session.step == STEPS
    return {} if compute else counts


def train_parts(kind, **settings):
    """Train a model whose parts are on several workers; return where the host read numbers of the device."""
    model = net()
    given = {
        "sharded": holdfast.Sharded(model),
        "pipeline": holdfast.Pipeline([model[:2], lambda: model[2]], F.cross_entropy),
    }[kind]
    session = holdfast.Session(given, lambda parameters: torch.optim.Adam(parameters), **(VIRTUAL | settings))
    with HostReads() as reads:
        for step in session.steps(dataset(), BATCH):
            if step.number == 0:
                reads.counts.clear()
            if kind == "pipeline":
                step.compute()
            else:
                for x, y in step:
                    step.backward(F.cross_entropy(model(x.to(META)), y.to(META)))
            if step.number == STEPS - 1:
                counts = dict(reads.counts)
    assert session.step == STEPS
    return counts


def prepare(*, faults=(), **settings):
    model = net()
    more = {"faults": plan(*faults)} if faults else {}
    model, optimizer, loader = holdfast.prepare(
        model, adam(model), DataLoader(dataset(), BATCH), **(VIRTUAL | more | settings)
    )
    with HostReads() as reads:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(META)), y.to(META)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if loader.step == STEPS - 1:
                counts = dict(reads.counts)
    assert loader.step == STEPS
    return counts


KILL = ("kill:rank=1,step=1,phase=allreduce,bucket=1",)
HASHED = "integrity/device_digest.py:read"
EQUAL = "state/transfer.py:adopt_lowest"
WAYS = {
    "all of these": (train, {"order": "tree", "clip_grad_norm": 1.0, "average": True, "guard_sums": True}, {HASHED}),
    "no-guard": (train, {"guard": "off", "certificate": False}, set()),
    "heal": (train, {"guard": "heal"}, {HASHED, "integrity/ranges.py:look_at"}),
    "kill": (train, {"faults": KILL}, {HASHED}),
    "kill-forward": (train, {"faults": KILL, "strategy": "forward"}, {HASHED}),
    "kill-restart": (train, {"faults": KILL, "strategy": "restart"}, {HASHED}),
    "sharded": (train_parts, {"kind": "sharded"}, {HASHED}),
    "pipeline-clip": (train_parts, {"kind": "pipeline", "clip_grad_norm": 1.0}, {HASHED, "models/part.py:norm"}),
    "prepare-kill": (prepare, {"faults": KILL}, {HASHED, EQUAL}),
}
"""Name: how it trains, its options, and where the host may wait for the device. These lists may only become shorter."""


@pytest.mark.parametrize("name", WAYS)
def test_on_another_device_everything_stays_there_and_the_host_waits_only_where_it_is_listed(name):
    how, options, allowed = WAYS[name]

    with elsewhere():
        counts = how(**options)

    assert set(counts) == allowed


def test_a_step_reads_the_device_twice():
    """One read for the part of the state that is compared between replicas, one for the buffers in the certificate."""
    with elsewhere():
        counts = train()

    assert counts == {HASHED: STEPS - 1}, "the first step has begun before the count does"


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_step_compute_moves_inputs_and_stays_there(norm):
    with elsewhere():
        train(norm=norm, compute=True)


def test_reading_a_number_is_noticed():
    with HostReads() as reads:
        torch.zeros(3, device=META).tolist()
        float(torch.zeros((), device=META))
        torch.zeros(3, device=META).cpu()

    assert reads.counts == {"the script": 3}


def test_mixing_devices_is_noticed():
    with HostReads(), pytest.raises(AssertionError, match="mixes devices"):
        torch.zeros(3, device=META).add_(torch.zeros(3))


def test_a_model_that_moves_after_the_session_has_seen_it_is_refused():
    model = nn.Linear(4, 3)
    session = holdfast.Session(model, adam(model), **VIRTUAL)
    model.to(META)

    with pytest.raises(ConfigError, match="the model was moved from cpu to meta after it was passed to the session"):
        next(session.steps(dataset(), BATCH))


def test_a_process_that_runs_all_workers_adds_on_the_device_in_few_calls():
    """As many for a million numbers as for a hundred; in host memory it goes tile by tile."""
    calls = []

    class Calls(HostReads):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    for length in (100, 1_000_000):
        span = SlotSpan(0, length, torch.float32)
        add = OrderedAllReduce(VirtualCommunicator(3), "fold", span.end, device=META)
        for row in range(3):
            add.room(row)
        add(span, {0: 0, 1: 1, 2: 2})
        with Calls():
            add(span, {0: 0, 1: 1, 2: 2}, mean=MeanDivisor(3, length))

    assert 2 * (len(calls) // 2) == len(calls)
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert calls.count(torch.ops.aten.add_.Tensor) == 2


def test_a_fabric_that_does_not_train_there_says_so(monkeypatch):
    monkeypatch.setattr(GlooFabric, "devices", ("cpu",))
    model = net()

    with (
        elsewhere(),
        pytest.raises(ConfigError, match="the model is on meta, but the fabric gloo trains models on cpu"),
    ):
        next(holdfast.Session(model, adam(model), fabric="gloo").steps(dataset(), BATCH))


def test_delta_standbys_need_host_memory():
    settings = VIRTUAL | {"strategy": "partial", "mirror": 1, "mirror_every": 4}

    with elsewhere(), pytest.raises(ConfigError, match=r"mirror_every above 1 needs a model in CPU memory, .* on meta"):
        holdfast.Session(holdfast.Sharded(net()), torch.optim.Adam, **settings)


def test_a_model_on_two_devices_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3).to(META))

    with (
        elsewhere(),
        pytest.raises(ConfigError, match=r"must be on one device, got 0.weight on cpu and 1.weight on meta"),
    ):
        holdfast.Session(holdfast.Sharded(model), torch.optim.Adam)


@pytest.mark.parametrize("fabric", ["gloo", "ulfm"])
def test_an_optimizer_in_a_thread_needs_host_memory(fabric):
    model = net()

    with elsewhere(), pytest.raises(ConfigError, match=r"--overlap-optimizer needs a model in CPU memory.* on meta"):
        next(holdfast.Session(model, adam(model), overlap_optimizer=True, fabric=fabric).steps(dataset(), BATCH))


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_checkpoint_is_saved_from_the_device_and_loaded_onto_it(tmp_path):
    settings = VIRTUAL | {"checkpoint_dir": str(tmp_path), "checkpoint_every": STEPS}
    with elsewhere():
        for resume in (False, True):
            model = net()
            optimizer = adam(model)
            with HostReads():
                session = holdfast.Session(model, optimizer, resume=resume, **settings)
                first = None
                for step in session.steps(dataset(), BATCH, epochs=1 + resume):
                    first = step.number if first is None else first
                    for x, y in step:
                        step.backward(F.cross_entropy(model(x.to(META)), y.to(META)))
            assert first == (STEPS if resume else 0)
            state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
            assert {tensor.device for tensor in (*model.parameters(), *model.buffers(), *state)} == {META}
