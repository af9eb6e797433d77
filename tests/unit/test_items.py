"""Losses that are means over items, such as tokens or pixels, and not over samples: the same for any number of slices."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from written_plans import plan

import holdfast
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.training_state import model_sha256
from holdfast.records.files import read_run
from holdfast.records.types import StepCommitted
from holdfast.session import gradient_hook

SAMPLES, BATCH = 48, 12
DEATHS = [
    f"kill:{where}"
    for where in ("rank=1,step=1,phase=backward", "rank=3,step=2,phase=allreduce", "rank=0,step=5,phase=optimizer")
]


def data(fill=None):
    """Images, each with a mask of the pixels that count: from none to nearly all."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(SAMPLES, 9, generator=generator)
    mask = torch.rand(SAMPLES, 9, generator=generator) < torch.rand(SAMPLES, 1, generator=generator) ** 3
    if fill is not None:
        mask[:] = fill
    return TensorDataset(x, mask)


def masked(model, x, mask):
    """The mean over the pixels that count; not a number if there is none."""
    return (model(x) - x)[mask].square().mean()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 9))


def alone(clip=None, lost=slice(0)):
    """The same training in plain PyTorch, a mini-batch at once; without samples of the second one that are lost."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(2):
        for x, mask in DataLoader(data(), BATCH):
            sgd.zero_grad()
            if len(losses) == 1:
                mask[lost] = False
            loss = masked(model, x, mask)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            sgd.step()
            losses.append(loss.item())
    return model, losses


def settings(workers, slices, faults=(), **more):
    return {"fabric": "virtual", "workers": workers, "slices": slices, "faults": plan(*faults), **more}


def in_session(workers=4, slices=4, faults=(), wrap=lambda m: m, clip=None, dataset=None, count=None, **more):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if more.pop("scaled", False) else None
    wrapped = wrap(model)
    make = (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)) if wrapped is not model else None
    sgd = make or torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    session = holdfast.Session(
        wrapped, sgd, scaler=scaler, clip_grad_norm=clip, **settings(workers, slices, faults, **more)
    )
    losses = []
    for step in session.steps(dataset or data(), BATCH, 2, shuffle=False):
        if step.attempt == 0:
            losses.append(session.metrics.get("loss"))
        for x, mask in step:
            step.backward(masked(model, x, mask), items=(count or torch.sum)(mask))
    return model, [*losses[1:], session.metrics.get("loss")]


def assert_close(model, expected):
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("slices", "clip"), [(1, None), (2, 0.05), (3, None), (12, 0.05)])
def test_loss_and_gradient_are_those_of_the_whole_mini_batch(slices, clip):
    expected, losses = alone(clip)

    model, seen = in_session(min(slices, 3), slices, clip=clip)

    assert_close(model, expected)
    assert seen == pytest.approx(losses, rel=1e-5)


def test_without_items_a_slice_counts_by_its_samples():
    """The negative control: the weights are visibly others."""
    model, _ = in_session(slices=3, count=lambda mask: None)

    assert (model[0].weight - alone()[0][0].weight).abs().max() > 1e-3 or not model[0].weight.isfinite().all()


@pytest.mark.parametrize(
    "more",
    [{}, {"scaled": True}, {"wrap": lambda m: holdfast.Sharded(m, 2)}, {"clip": 0.05}, {"bucket_bytes": 64}],
    ids=["plain", "scaled", "sharded", "clipped", "small buckets"],
)
def test_deaths_change_no_bit(more):
    deaths = DEATHS if "wrap" not in more else DEATHS[:1]
    undisturbed, losses = in_session(**more)

    model, seen = in_session(faults=deaths, **more)

    assert model_sha256(model) == model_sha256(undisturbed)
    assert seen == losses
    assert_close(undisturbed, alone(more.get("clip"))[0])


def in_loop(faults=(), accumulate=1, clip=None):
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, sgd, loader = holdfast.prepare(
        model, sgd, DataLoader(data(), BATCH), accumulate=accumulate, **settings(4, 4, faults)
    )
    for _ in range(2):
        for x, mask in loader:
            loader.mean_over(mask.sum())
            (masked(model, x, mask) / accumulate).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            sgd.step()
            sgd.zero_grad()
    return model_sha256(model), loader.metrics


@pytest.mark.parametrize("clip", [0.05])
def test_a_prepared_loop_has_the_bits_of_a_session(clip):
    model, losses = in_session(clip=clip)

    assert in_loop(clip=clip) == (model_sha256(model), {"loss": losses[-1]})
    assert in_loop(DEATHS, clip=clip) == in_loop(clip=clip)
    assert in_loop(DEATHS, accumulate=4, clip=clip) == in_loop(clip=clip), "a power of two rounds nothing"


def test_strategy_forward_divides_by_the_items_that_are_left():
    """The slice of the worker that dies, samples 3 to 5 of the second mini-batch, is lost."""
    model, losses = in_session(4, 4, ("kill:rank=1,step=1,phase=backward",), strategy="forward")

    expected, theirs = alone(lost=slice(3, 6))

    assert_close(model, expected)
    assert losses == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_slice_without_items_counts_as_nothing_though_its_loss_is_no_number(scaled):
    x, mask = data().tensors
    mask[::BATCH], mask[1::BATCH], mask[2::BATCH] = False, False, False  # the first slice of each step
    gapped = TensorDataset(x, mask)

    model, losses = in_session(slices=4, dataset=gapped, scaled=scaled)

    assert all(math.isfinite(loss) for loss in losses)
    assert_close(model, in_session(1, 1, dataset=gapped)[0])


def test_a_step_without_items_has_zero_gradients_and_no_loss():
    before = net()

    model, losses = in_session(dataset=data(fill=False))

    assert losses == [None] * 8
    assert model_sha256(model) == model_sha256(before)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("items", [-1, math.nan, math.inf])
def test_a_number_that_cannot_be_one_of_items_is_refused(items):
    with pytest.raises(ScriptError, match="the number of items of a slice must be at least 0, and finite"):
        in_session(count=lambda mask: items)


def test_items_that_are_counted_too_late_are_refused():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    model, sgd, loader = holdfast.prepare(model, sgd, DataLoader(data(), BATCH), **settings(1, 1))
    x, mask = next(batches := iter(loader))
    masked(model, x, mask).backward()

    with pytest.raises(ScriptError, match=r"before loss\.backward\(\)"):
        loader.mean_over(mask.sum())

    del batches
    gradient_hook.forget()


def two_losses(between):
    """A prepared loop with two optimizers, whose losses are means over the items that ``between`` counts a second time."""
    models = [net(), net()]
    sgds = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    models, sgds, loader = holdfast.prepare(models, sgds, DataLoader(data(), BATCH), **settings(1, 1))
    try:
        for x, mask in loader:
            loader.mean_over(mask.sum())
            masked(models[0], x, mask).backward()
            sgds[0].step()
            between(loader, mask)
            masked(models[1], x, mask).backward()
            sgds[1].step()
    finally:
        gradient_hook.forget()


def test_two_losses_of_a_slice_are_means_over_the_same_items():
    two_losses(lambda loader, mask: loader.mean_over(mask.sum()))
    with pytest.raises(ScriptError, match=r"counted after its first backward pass.* over the same items"):
        two_losses(lambda loader, mask: loader.mean_over(mask.sum() + 1))


@pytest.mark.parametrize("first", [True, False])
def test_slices_with_and_without_items_are_refused(first):
    calls = iter(range(100))
    number = "no number of items, and the previous one has one" if first else "a number of items, .* has none"

    with pytest.raises(ScriptError, match=f"slice 1 of step 0 has {number}: pass it in every slice or in none"):
        in_session(1, 4, count=lambda mask: mask.sum() if (next(calls) == 0) == first else None)


def test_an_optimizer_that_runs_before_the_items_are_known_is_refused():
    with pytest.raises(ConfigError, match="cannot be used with --overlap-optimizer"):
        in_session(overlap_optimizer=True)


def test_reports_have_the_mean_over_items(tmp_path):
    _, losses = in_session(run_dir=str(tmp_path))

    steps = [record for record in read_run(tmp_path) if isinstance(record, StepCommitted)]
    assert [record.metrics["loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
