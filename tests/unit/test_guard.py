"""The guard: what it hashes, what it keeps, what it takes for out of range; and all of it in one process."""

import dataclasses
import math

import pytest
import reference
import torch
import torch.nn.functional as F
import train_flip
import train_split
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
from written_plans import plan

import holdfast
from holdfast.cli import main
from holdfast.errors import ConfigError, ReplicasDiffer
from holdfast.integrity.fingerprint import EVERYTHING, WINDOW_BYTES, RotatingDigest
from holdfast.integrity.ranges import Ranges
from holdfast.integrity.recompute_check import RecomputeCheck
from holdfast.integrity.sdc_guard import SdcGuard
from holdfast.integrity.snapshots import copied
from holdfast.records.files import read_run
from holdfast.recovery.vote import MinMax
from holdfast.tools.checkpoints.plausible import find_odd


def make(hidden=512):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return model, torch.optim.Adam(model.parameters())


def step(model, optimizer, times=1):
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()


# -- fingerprints


def test_every_bit_of_weights_and_optimizer_is_in_some_window_of_a_rotation():
    model, optimizer = make()
    step(model, optimizer)
    digest = RotatingDigest(model, optimizer, 64)
    before = [digest.of_step(i) for i in range(digest.rotation)]

    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    for tensor in tensors:
        number = tensor.data.reshape(-1)
        kept, number[-1] = number[-1].clone(), number[-1] + 1
        assert [digest.of_step(i) for i in range(digest.rotation)] != before
        number[-1] = kept
    assert [digest.of_step(i) for i in range(digest.rotation)] == before
    assert digest.rotation > 3


@pytest.mark.parametrize("longest", [4, 64])
def test_a_rotation_is_no_longer_than_asked_for_and_a_window_no_larger_than_it_takes(longest):
    model, optimizer = make(4096)
    step(model, optimizer)
    digest = RotatingDigest(model, optimizer, longest)

    sizes = [sum(rows.nbytes for _, rows in digest.values(i)) for i in range(digest.rotation)]
    total = sum(p.nbytes for p in model.parameters())
    assert digest.rotation <= longest
    assert max(sizes) <= 2 * max(2 * WINDOW_BYTES, 3 * total // longest)


def test_windows_are_those_of_whoever_comes_later_with_the_same_state():
    """Of a newcomer the optimizer's tensors are others, made by loading, and they appear at once."""
    (old, optimizer), (new, its) = make(), make()
    digest = RotatingDigest(old, optimizer, 64)
    first, version = digest.rotation, digest.version
    step(old, optimizer, 3)
    theirs = RotatingDigest(new, its, 64)
    assert theirs.rotation == first
    new.load_state_dict(old.state_dict())
    its.load_state_dict(copied(optimizer.state_dict()))

    assert digest.rotation == theirs.rotation > first
    assert digest.version > version
    assert [digest.of_step(i) for i in range(99)] == [theirs.of_step(i) for i in range(99)]
    assert digest.of_step(EVERYTHING) == theirs.of_step(EVERYTHING)


def test_what_is_certified_does_not_depend_on_how_much_replicas_compare():
    """Nor on whether they compare at all: links are the same with every guard."""
    model, optimizer = make(4096)
    step(model, optimizer)
    buffers = [("mean", torch.arange(5.0))]
    wide, narrow = (RotatingDigest(model, optimizer, longest, buffers=buffers) for longest in (4, 0))
    last = narrow.rotation

    taken = [(wide.take(i), narrow.take(i)) for i in range(last)]
    buffers[0][1][4] += 1
    again = [narrow.take(i) for i in range(last)]

    assert wide.rotation == 4 < last
    assert all(one.certified == other.certified for one, other in taken)
    assert all(one.replicas == wide.of_step(i) != other.replicas for i, (one, other) in enumerate(taken))
    assert all(now.replicas == before.replicas for now, (_, before) in zip(again, taken, strict=True)), "no buffers"
    assert all(now.certified != before.certified for now, (_, before) in zip(again, taken, strict=True))


@pytest.mark.parametrize("longest", [0, 4, 7])
def test_all_windows_are_compared_in_any_rotation_whenever_it_begins(longest):
    model, optimizer = make(4096)
    step(model, optimizer)
    digest = RotatingDigest(model, optimizer, longest)

    everything = {piece.place for piece in digest.pieces(EVERYTHING)}
    for first in (0, 1, 17):
        steps = range(first, first + digest.rotation)
        assert {piece.place for i in steps for piece in digest.pieces(i)} == everything


def test_windows_do_not_depend_on_how_a_tensor_lies_in_memory():
    torch.manual_seed(0)
    model = nn.Conv2d(8, 64, 3)
    lain = nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)
    lain.load_state_dict(model.state_dict())

    assert not lain.weight.is_contiguous()
    assert RotatingDigest(model).of_step(EVERYTHING) == RotatingDigest(lain).of_step(EVERYTHING)


# -- copies


def test_a_copy_shares_nothing_and_is_written_into_the_memory_of_an_older_one():
    model, optimizer = make()
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": [1, (torch.ones(2), "x")]}
    first = copied(state)
    step(model, optimizer)
    again = copied(state | {"optimizer": optimizer.state_dict()}, first)

    for name, tensor in model.state_dict().items():
        assert torch.equal(again["model"][name], tensor)
        assert again["model"][name].data_ptr() == first["model"][name].data_ptr() != tensor.data_ptr()
    assert again["optimizer"]["state"][0]["step"] == 2.0
    assert again["list"][1][1] == "x"


def test_what_does_not_fit_into_an_older_copy_gets_memory_of_its_own():
    room = {"a": torch.zeros(3), "b": torch.zeros(2)}

    again = copied({"a": torch.ones(2), "c": torch.ones(2, dtype=torch.float64)}, room)

    assert set(again) == {"a", "c"}
    assert torch.equal(again["a"], torch.ones(2))


# -- whose history does not reproduce


def test_who_computes_otherwise_than_before_is_told_so_from_the_step_gone_back_to_on():
    computed, right, wrong = RecomputeCheck(), [torch.ones(3)], [torch.tensor([1.0, 1.0, 1.0000001])]
    assert not any(computed.note(i, 0, wrong if i == 5 else right) for i in range(7))

    computed.go_back(3)

    assert [computed.note(i, 0, right) for i in range(3, 9)] == [False, False, True, False, False, False]


def test_what_nobody_goes_back_to_is_forgotten():
    computed = RecomputeCheck()
    computed.note(1, 0, [torch.ones(1)])
    computed.note(2, 0, [torch.ones(1)])
    computed.forget(2)
    computed.go_back(0)

    assert not computed.note(1, 0, [torch.zeros(1)])
    assert computed.note(2, 0, [torch.zeros(1)])


# -- ranges


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_the_first_step(value):
    found = Ranges().look_at("weights", "fc", torch.tensor([1.0, value]))

    assert found is not None
    assert (found.kind, found.where) == ("weights", "fc")


def test_a_flip_of_the_critical_bit_is_far_and_what_grows_slowly_is_not():
    ranges = Ranges()
    for i in range(100):
        assert ranges.look_at("weights", "fc", torch.full((4,), 0.05 * 1.02**i)) is None
        ranges.count_step(["weights"])

    now = torch.full((4,), 0.05 * 1.02**99)
    flipped = now.clone()
    flipped.view(torch.int32)[1] ^= 1 << 30
    assert ranges.look_at("weights", "fc", flipped) is not None
    assert ranges.look_at("weights", "fc", now * 2000) is not None
    assert ranges.look_at("weights", "fc", now * 100) is None


def test_what_was_accepted_is_not_found_again():
    ranges = Ranges()
    assert ranges.look("loss", "loss", (math.nan,)) is not None
    ranges.accept()

    assert ranges.look("loss", "loss", (math.nan,)) is None


def test_a_hundred_thousand_losses_with_heavy_tails_ring_no_alarm():
    """Pareto with a = 2, the heaviest tail that the limit is made for: 7e-6 alarms are expected."""
    ranges = Ranges()
    losses = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** -0.5

    alarms = 0
    for loss in losses.tolist():
        alarms += ranges.look("loss", "loss", (loss,)) is not None
        ranges.count_step(["loss"])
    assert alarms == 0
    assert ranges.look("loss", "loss", (2000 * float(losses.max()),)) is not None


# -- all of it, with workers of one process

FLIP = "flip:rank={},step={},target={},count=1,bits={},at={}"


def train(tmp_path, guard, *specs, **settings):
    tmp_path.mkdir(exist_ok=True)
    faults = plan(*specs)
    settings = {"fabric": "virtual", "workers": 3, "guard": guard, "faults": faults, "epochs": 3} | settings
    _, state = train_flip.train(run_dir=str(tmp_path), **settings)
    records = [type(r).__name__ for r in read_run(tmp_path)]
    return state, records, read_run(tmp_path)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The state at the end of an undisturbed run without a guard, of 21 steps like all."""
    return train(tmp_path_factory.mktemp("off"), "off")[0]


def test_a_run_without_faults_rings_no_alarm_and_keeps_its_bits(tmp_path, quiet):
    state, records, _ = train(tmp_path / "heal", "heal")

    assert state == quiet
    assert records.count("StepCommitted") == 21
    assert not {"CorruptionFound", "CorruptionHealed", "Recovered"} & set(records)


@pytest.mark.parametrize(
    "flips",
    [
        [(1, 0, "weights", "30", "1.weight")],
        [(2, 9, "optimizer", "22", "1.weight/exp_avg")],
        [(0, 20, "weights", "3", "1.weight")],
        [(0, 5, "optimizer", "28", "4.weight/exp_avg_sq"), (2, 17, "weights", "12", "1.weight")],
    ],
    ids=["first-step", "optimizer", "last-step", "twice"],
)
def test_flips_are_healed_to_the_bits_of_the_undisturbed_run_and_are_there_otherwise(tmp_path, quiet, flips):
    specs = [FLIP.format(*flip) for flip in flips]
    state, _, records = train(tmp_path / "heal", "heal", *specs)
    warned, names, _ = train(tmp_path / "warn", "warn", *specs)

    healed = [r for r in records if type(r).__name__ == "CorruptionHealed"]
    found = [r for r in records if type(r).__name__ == "CorruptionFound"]
    assert state == quiet
    assert [r.ranks for r in found] == [(flip[0],) for flip in flips], "the minority"
    assert len(healed) == len(flips)
    assert all(r.ranks in ((), (flip[0],)) for r, flip in zip(healed, flips, strict=True)), "who computed otherwise"
    assert warned != quiet, "the negative control"
    assert "CorruptionFound" in names


@pytest.mark.parametrize(("guard", "times"), [("stop", 0), ("heal", 1)])
def test_a_worker_that_trains_alone_says_once_that_there_is_no_replica_to_compare_with(tmp_path, capfd, guard, times):
    kills = [f"kill:rank={rank},step={4 + rank}" for rank in range(2)]
    _, _, records = train(tmp_path, guard, *kills)

    assert [r.rank for r in records if type(r).__name__ == "Finished"] == [2]
    said = "trains alone from step 5 on"
    assert capfd.readouterr().err.count(said) == times


@pytest.mark.parametrize("struck", [(0, 1, 2), (1, 2)])
def test_nobody_is_named_where_several_computed_otherwise(tmp_path, quiet, struck):
    flips = [FLIP.format(rank, 6, "weights", "30", "1.weight") for rank in struck]
    state, _, records = train(tmp_path / "heal", "heal", *flips)

    (healed,) = [r for r in records if type(r).__name__ == "CorruptionHealed"]
    assert state == quiet
    assert healed.ranks == ()


def test_a_learning_rate_that_is_too_high_is_found_once_and_training_goes_on(tmp_path):
    state, records, found = train(tmp_path, "heal", lr=1e18)
    diverged, _, _ = train(tmp_path / "off", "off", lr=1e18)

    assert state == diverged
    assert records.count("CorruptionFound") == records.count("CorruptionHealed") > 0
    assert all(r.is_training for r in found if type(r).__name__ == "CorruptionHealed")


def test_a_split_model_cannot_be_healed():
    pipeline = holdfast.Pipeline([nn.Linear(3, 3), nn.Linear(3, 2)], F.cross_entropy)
    session = holdfast.Session(
        pipeline, lambda p: torch.optim.SGD(p, lr=0.1), fabric="virtual", workers=2, guard="heal"
    )

    with pytest.raises(ConfigError, match="guard heal needs a replicated model"):
        next(session.steps(TensorDataset(torch.ones(8, 3), torch.zeros(8).long()), 4))


def train_parts(kind, optimizer, flips, **settings):
    module = reference.make_model("mlp")
    model = holdfast.Sharded(module, shards=3)
    if kind == "pipeline":
        model = holdfast.Pipeline(train_split.stages(), train_split.loss)
    session = holdfast.Session(model, optimizer, fabric="virtual", workers=4, slices=4, faults=plan(*flips), **settings)
    for at in session.steps(TensorDataset(*reference.data()), reference.BATCH):
        if kind == "pipeline":
            at.compute()
            continue
        for x, y in at:
            at.backward(F.cross_entropy(module(x), y))


@pytest.mark.parametrize(("kind", "certificate"), [("pipeline", True), ("sharded", False)])
def test_the_optimizers_state_of_a_part_is_compared_too_among_those_who_hold_it(kind, certificate):
    """With a learning rate of 0 the weights never tell."""

    def optimizer(parameters):
        return torch.optim.Adam(parameters, lr=0.0)

    train_parts(kind, optimizer, [], certificate=certificate)
    with pytest.raises(ReplicasDiffer, match="the replicas differ before step"):
        train_parts(kind, optimizer, ["flip:rank=3,step=3,target=optimizer,bits=20"], certificate=certificate)


def hashed_in(monkeypatch, tmp_path, **settings):
    """Return how often a window was hashed in each step of a training, and when all of it was."""
    of_windows, of_all = [], []
    take, of_step, tensors = RotatingDigest.take, RotatingDigest.of_step, RotatingDigest.tensors
    with monkeypatch.context() as patch:
        patch.setattr(RotatingDigest, "take", lambda it, at: (of_windows.append(at), take(it, at))[1])
        patch.setattr(RotatingDigest, "of_step", lambda it, *at: (of_all.append(at), of_step(it, *at))[1])
        patch.setattr(RotatingDigest, "tensors", lambda it: (of_all.append("tensors"), tensors(it))[1])
        train_flip.train(fabric="virtual", workers=3, run_dir=str(tmp_path), epochs=1, **settings)
    return of_windows, of_all


@pytest.mark.parametrize("overlap", [False, True])
def test_the_state_is_hashed_once_a_step_for_guard_and_certificate_together(tmp_path, monkeypatch, overlap):
    steps = list(range(train_flip.STEPS // train_flip.EPOCHS))

    def hashed(**settings):
        return hashed_in(monkeypatch, tmp_path, overlap_optimizer=overlap, **settings)

    assert hashed() == (steps, ["tensors", (EVERYTHING,), "tensors"])
    assert hashed(guard="off") == (steps[1:], ["tensors"] * 2)
    assert hashed(certificate=False) == (steps, [(EVERYTHING,)])
    assert hashed(guard="off", certificate=False) == ([], [])


def test_what_comes_again_after_going_back_is_no_soft_error(tmp_path, monkeypatch):
    """Two workers that compute differently in the same step, whenever it is done."""
    real = SdcGuard.fill

    def lie(watch, step, *, is_last):
        said = real(watch, step, is_last=is_last)
        lied = dataclasses.replace(said, replicas=MinMax(said.replicas.largest + 1, said.replicas.smallest))
        return lied if step == 5 else said

    monkeypatch.setattr(SdcGuard, "fill", lie)
    with pytest.raises(ReplicasDiffer, match="differ before step 5, again after a rollback to step 0"):
        train(tmp_path, "heal")


def forget_all(monkeypatch, at, trusted):
    """Let newcomers come at a step, as far as what is kept in memory goes."""
    real = SdcGuard.applied

    def applied(watch, keep):
        real(watch, keep)
        if watch._job.step == at:
            watch.newcomers_joined(keep)
            watch._trusted = trusted

    monkeypatch.setattr(SdcGuard, "applied", applied)


def test_without_a_state_in_memory_all_go_back_to_a_checkpoint_that_is_old_enough(tmp_path, quiet, monkeypatch):
    forget_all(monkeypatch, at=12, trusted=7)
    where = tmp_path / "ckpt"

    state, _, records = train(
        tmp_path / "heal", "heal", FLIP.format(1, 13, "weights", "22", "4.bias"),
        checkpoint_dir=str(where), checkpoint_every=5,
    )  # fmt: skip

    (healed,) = [r for r in records if type(r).__name__ == "CorruptionHealed"]
    assert (healed.source, healed.went_back_to) == ("checkpoint", 5), "that of step 10 may be corrupt"
    saved = [r.step for r in records if type(r).__name__ == "CheckpointSaved"]
    assert saved == [5, 10, 10, 15, 20] or saved == [5, 10, 15, 10, 15, 20]
    assert state == quiet


def test_without_anything_that_is_known_to_be_right_training_stops(tmp_path, monkeypatch):
    forget_all(monkeypatch, at=12, trusted=4)

    with pytest.raises(ReplicasDiffer, match="no state to roll back to is known to be right"):
        train(
            tmp_path, "heal", FLIP.format(1, 13, "weights", "22", "4.bias"),
            checkpoint_dir=str(tmp_path / "ckpt"), checkpoint_every=5,
        )  # fmt: skip


# -- files of other programs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_flip_of_the_critical_bit_is_named_with_its_index(dtype):
    tensor = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).to(dtype) / 100
    assert find_odd(tensor) is None
    tensor[3, 4] = math.nan if dtype == torch.float16 else 3e36

    odd = find_odd(tensor)

    assert odd is not None
    assert (odd.index, odd.count) == ((3, 4), 1)
    assert "[3, 4] is " in str(odd)
    assert " among values of about 0.0" in str(odd)


def test_what_is_meant_is_plausible():
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    squares = torch.logspace(-20, 3, 200)

    assert [find_odd(tensor) for tensor in (mask, squares, torch.zeros(3), torch.arange(5), torch.empty(0))] == [
        None
    ] * 5


@pytest.mark.parametrize(("guard", "code"), [("warn", 0), ("stop", 3), ("off", 0)])
def test_a_file_with_an_absurd_value_is_warned_of_or_refused(tmp_path, capsys, guard, code):
    weights = torch.full((4, 5), 0.01)
    weights[2, 1] = 3e36
    save_file({"fc.weight": weights, "fc.bias": torch.ones(5)}, tmp_path / "a.safetensors")

    files = [str(tmp_path / "a.safetensors"), str(tmp_path / "b")]
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "convert", *files, "--to", "npz", "--guard", guard])

    assert ended.value.code == code
    said = "fc.weight[2, 1] is 3e+36 among values of about 0.01" in capsys.readouterr().err
    assert said == (guard != "off")
