"""The networks: their sizes, their seeds, their options, and what they are cut into."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.workloads.models import (
    IMAGE_MODELS,
    MODELS,
    Block,
    NetworkLayout,
    layers_of,
    layout,
    loss_of,
    make_model,
    make_stage,
    split,
    stages,
)
from holdfast_lab.workloads.models.stages import costs
from holdfast_lab.workloads.recipes import RECIPES

PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "googlenet": 6_624_904,
}
"""Torchvision's, with 1000 classes."""

SMALL = {
    "mlp": (118_282, 411_146),
    "cnn": (55_114, 55_402),
    "alexnet": (4_556_490, 4_557_642),
    "vgg16": (15_243_978, 15_245_130),
    "resnet18": (11_172_810, 11_173_962),
    "resnet50": (23_519_690, 23_520_842),
    "googlenet": (5_487_530, 5_490_986),
}
"""With 10 classes of 1x28x28 and of 3x32x32."""

TINY_GPT = {"context": 8, "layers": 2, "heads": 2, "width": 16}

QUICK = {
    "mlp": {},
    "cnn": {},
    "alexnet": {"image": (1, 28)},
    "resnet18": {"image": (1, 16)},
    "googlenet": {"image": (1, 16), "aux": True},
    "gpt": TINY_GPT,
}
"""One of each kind that is run; ResNet-50 and VGG-16 differ from others in their shapes only, which ``meta`` checks."""


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def samples_of(name: str, count: int = 2, **options) -> torch.Tensor:
    whole = layout(name, **options)
    if whole.dtype == torch.int64:
        return torch.randint(65, (count, *whole.sample))
    return torch.rand(count, *whole.sample)


# -- sizes


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_network_has_the_parameters_of_the_published_one(name, count):
    assert size(make_model(name, device="meta")) == count


def test_the_heads_in_the_middle_of_googlenet_have_their_parameters():
    assert size(make_model("googlenet", aux=True, device="meta")) == 13_004_888
    assert size(make_model("googlenet", 10, image=(1, 28), aux=True, device="meta")) == 9_838_014
    assert size(make_model("googlenet", 10, image=(3, 32), aux=True, device="meta")) == 9_841_470


@pytest.mark.parametrize(("name", "counts"), SMALL.items())
def test_a_small_form_is_as_large_as_it_says(name, counts):
    made = [make_model(name, 10, image=image, device="meta") for image in ((1, 28), (3, 32))]

    assert tuple(map(size, made)) == counts


def test_the_other_networks_are_as_large_as_they_say():
    sizes = {name: size(make_model(name, device="meta")) for name in ("mlp", "cnn", "gpt")}

    assert sizes == {"mlp": 26_122, "cnn": 55_114, "gpt": 10_770_048}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("alexnet", 0.714), ("vgg16", 15.47), ("resnet18", 1.814), ("resnet50", 4.089), ("googlenet", 1.498)],
)
def test_a_network_multiplies_as_often_as_the_published_one(name, billions):
    """Sizes alone would not show a wrong stride. The numbers are torchvision's, of one image of 3x224x224."""
    assert sum(costs(layout(name), "operations")) / 2e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("image", [(1, 16), (2, 63), (3, 227)])
def test_a_network_takes_images_of_every_size(name, image):
    channels, side = image
    model = make_model(name, 7, image=image, device="meta")

    assert model(torch.empty(2, channels, side, side, device="meta")).shape == (2, 7)


def test_the_described_layers_hold_all_parameters():
    layers = layers_of(make_model("resnet50", device="meta"))

    count = sum(
        2 * layer["outputs"]
        if layer["kind"] == "norm"
        else layer["inputs"] * layer["outputs"] * layer.get("kernel", 1) ** 2 + layer["bias"] * layer["outputs"]
        for layer in layers
    )
    assert count == PUBLISHED["resnet50"]


# -- what they compute


@pytest.mark.parametrize("name", QUICK)
def test_a_network_learns_from_one_sample(name):
    """The last slice of an epoch may hold no more. Every parameter takes part."""
    model = make_model(name, **QUICK[name])
    x = samples_of(name, 1, **QUICK[name])
    y = torch.zeros(x.shape if name == "gpt" else 1, dtype=torch.int64)

    loss_of(model(x), y).backward()

    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    if name == "gpt":
        assert all(gradient.any() for gradient in gradients)


def test_the_heads_of_googlenet_count_less_and_only_in_training():
    model = make_model("googlenet", 3, image=(1, 16), aux=True)
    x, y = torch.rand(2, 1, 16, 16), torch.tensor([0, 2])

    scores = model(x)

    assert [tuple(head.shape) for head in scores] == [(2, 3)] * 3
    last, first, second = (nn.functional.cross_entropy(head, y) for head in scores)
    assert loss_of(scores, y).item() == pytest.approx((last + 0.3 * first + 0.3 * second).item())
    assert model.eval()(x).shape == (2, 3)


def test_the_heads_of_googlenet_change_no_other_weight_and_no_answer():
    plain, with_heads = (make_model("googlenet", 3, image=(1, 16), aux=aux).eval() for aux in (False, True))
    x = torch.rand(1, 1, 16, 16)

    assert torch.equal(plain(x), with_heads(x))


def test_gpt_sees_no_character_of_the_future_and_knows_places():
    model = make_model("gpt", 5, **TINY_GPT).eval()
    text = torch.tensor([[0, 1, 2, 3, 1, 1, 1, 1]])
    changed = torch.tensor([[0, 1, 2, 3, 4, 1, 1, 1]])

    one, other = model(text)[0], model(changed)[0]

    assert torch.equal(one[:4], other[:4])
    assert not torch.equal(one[4], other[4])
    assert not torch.equal(model(torch.tensor([[1, 1]]))[0, 0], model(torch.tensor([[1, 1]]))[0, 1])


def test_a_text_longer_than_the_context_is_refused():
    model = make_model("gpt", 5, **TINY_GPT)

    with pytest.raises(ConfigError, match=r"longer than the context of the network \(8\), got 9 characters"):
        model(torch.zeros(1, 9, dtype=torch.int64))


# -- seeds


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "gpt"])
def test_a_network_is_the_same_for_the_same_seed(name):
    one, same, other = (make_model(name, seed=seed, **QUICK[name]) for seed in (3, 3, 4))

    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_blocks_of_one_shape_have_weights_of_their_own():
    layers = [block for name, block in make_model("gpt", **TINY_GPT).named_children() if name.startswith("layer")]

    assert not torch.equal(layers[0].qkv.weight, layers[1].qkv.weight)


def test_making_a_network_draws_no_random_number_of_the_script():
    before = torch.get_rng_state()

    make_model("cnn", seed=3)

    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_device_is_heeded():
    with torch.device("meta"):
        model = make_model("resnet18", image=(1, 16))

    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


# -- stages


@pytest.mark.parametrize("name", QUICK)
def test_stages_compute_to_the_bit_what_the_whole_does(name):
    """Forward, gradients, running means and the random numbers of dropout; with as many stages as there can be."""
    options = QUICK[name]
    whole = make_model(name, seed=5, **options)
    parts = stages(name, len(layout(name, **options).blocks), seed=5, **options)
    x = samples_of(name, **options)
    y = torch.zeros(x.shape if name == "gpt" else len(x), dtype=torch.int64)

    results = []
    for model in ([whole], parts):
        torch.manual_seed(1)
        passed = x
        for part in model:
            passed = part(passed)
        loss = loss_of(passed, y)
        loss.backward()
        results.append(loss)

    assert torch.equal(*results)
    tensors, gradients = dict(whole.state_dict()), {n: p.grad for n, p in whole.named_parameters()}
    for part in parts:
        for key, tensor in part.state_dict().items():
            assert torch.equal(tensors.pop(key), tensor), key
        for key, parameter in part.named_parameters():
            assert torch.equal(gradients.pop(key), parameter.grad), key
    assert tensors == gradients == {}


@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_in_one_stage_whatever_their_number(name):
    whole = layout(name)
    parameter_bytes = costs(whole, "parameters")

    for n in range(1, len(whole.blocks) + 1):
        parts = split(whole, n, by=parameter_bytes)

        assert len(parts) == n
        assert all(parts)
        assert tuple(itertools.chain.from_iterable(parts)) == whole.blocks


def test_a_stage_alone_has_its_weights_of_the_whole():
    whole = make_model("resnet18", 10, image=(1, 28), seed=7).state_dict()

    stage = make_stage("resnet18", 3, 1, 10, image=(1, 28), seed=7)

    assert 0 < len(stage.state_dict()) < len(whole)
    assert all(torch.equal(whole[key], tensor) for key, tensor in stage.state_dict().items())


def test_a_stage_is_built_without_the_others(monkeypatch):
    drawn = []
    draw = nn.init.trunc_normal_
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda *a: drawn.append(a[0]) or draw(*a))

    stage = make_stage("googlenet", 3, 2)

    assert sum(tensor.numel() for tensor in drawn if not tensor.is_meta) <= size(stage) < PUBLISHED["googlenet"] / 2


def test_a_layout_becomes_a_stage_with_its_weights():
    """What stands on meta is given its weights without copying."""
    shapes = stages("gpt", 2, device="meta", **TINY_GPT)[1]

    shapes.load_state_dict(make_stage("gpt", 2, 1, seed=3, **TINY_GPT).state_dict(), assign=True)

    whole = make_model("gpt", seed=3, **TINY_GPT).state_dict()
    assert all(torch.equal(whole[key], tensor) for key, tensor in shapes.state_dict().items())


@pytest.mark.parametrize(
    ("by", "n", "expected"),
    [
        ([1, 1, 1, 1], 2, ["ab", "cd"]),
        ([4, 1, 1, 1, 1], 2, ["a", "bcde"]),
        ([1, 1, 1, 9, 1, 1], 4, ["a", "bc", "d", "ef"]),
        ([9, 1, 1, 1, 1], 3, ["a", "bc", "de"]),  # equal beyond the dearest one
        ([0, 0, 0], 2, ["a", "bc"]),
        ([0.5, 0.25, 0.25], 2, ["a", "bc"]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_it_can_be(by, n, expected):
    blocks = tuple(Block(name, nn.Identity) for name in "abcdef"[: len(by)])

    parts = split(NetworkLayout(blocks, (1,)), n, by=by)

    assert ["".join(block.name for block in part) for part in parts] == expected


def test_no_way_to_cut_has_a_cheaper_dearest_stage():
    whole = layout("alexnet")
    cost = dict(zip((block.name for block in whole.blocks), costs(whole, "operations"), strict=True))

    for n in range(1, 9):
        ours = max(sum(cost[block.name] for block in part) for part in split(whole, n, by="operations"))
        ways = ([0, *cuts, 8] for cuts in itertools.combinations(range(1, 8), n - 1))
        each = list(cost.values())
        assert ours == pytest.approx(min(max(sum(each[a:b]) for a, b in itertools.pairwise(way)) for way in ways))


@pytest.mark.parametrize("name", ["alexnet", "resnet18", "resnet50"])
def test_a_narrow_network_has_the_layers_of_the_published_one(name):
    published, narrow = (make_model(name, 10, image=(1, 28), device="meta", width=width) for width in (64, 16))

    assert size(published) == size(make_model(name, 10, image=(1, 28), device="meta"))
    assert [key for key, _ in narrow.named_parameters()] == [key for key, _ in published.named_parameters()]
    ratio = size(published) / size(narrow)
    assert 14 < ratio < 16  # a quarter of the channels on both sides of nearly every layer
    assert make_model(name, 10, image=(1, 28), width=4)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


# -- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_model("lenet"), f"model must be one of {', '.join(MODELS)}, got 'lenet'"),
        (lambda: make_model("cnn", 0), "num_classes must be at least 1, got 0"),
        (
            lambda: make_model("vgg16", image=(3, 15)),
            r"image of vgg16 must be \(channels, side\), at least \(1, 16\), got \(3, 15\)",
        ),
        (lambda: make_model("mlp", image=(1, 8, 8)), r"must be \(channels, side\), .* got \(1, 8, 8\)"),
        (lambda: make_model("gpt", image=(1, 8)), r"gpt reads text: leave image out, got \(1, 8\)"),
        (lambda: make_model("resnet18", aux=True), "options of resnet18 are: width; got 'aux'"),
        (lambda: make_model("vgg16", width=8), "options of vgg16 are: none; got 'width'"),
        (lambda: make_model("resnet18", width=0), "width must be at least 1, got 0"),
        (lambda: make_model("alexnet", width=0), "width must be at least 1, got 0"),
        (lambda: make_model("gpt", depth=2), "options of gpt are: context, layers, heads, width, dropout; got 'depth'"),
        (lambda: make_model("gpt", layers=0), "layers must be at least 1, got 0"),
        (lambda: make_model("gpt", heads=5), r"width must be a multiple of heads \(5\), got 384"),
        (lambda: make_model("gpt", dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: stages("alexnet", 0), r"n must be between 1 and the number of blocks \(8\), got 0"),
        (lambda: stages("alexnet", 9), r"n must be between 1 and the number of blocks \(8\), got 9"),
        (lambda: make_stage("cnn", 2, 2), r"index must be between 0 and 1 \(there are 2 stages\), got 2"),
        (lambda: stages("cnn", 2, by="layers"), "by must be one of parameters, operations, or a number for each block"),
        (lambda: stages("cnn", 2, by=[1, 2]), r"by must have a finite number, 0 or more, for each of the 4 blocks"),
        (lambda: stages("cnn", 2, by=[1, 2, 3, math.nan]), r"by must have a finite number"),
    ],
)
def test_what_cannot_be_built_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# -- recipes


def test_a_recipe_lowers_the_rate_when_it_says():
    recipe = RECIPES["alexnet"]
    optimizer = recipe.optimizer([nn.Parameter(torch.ones(1))])
    scheduler = recipe.scheduler(optimizer)
    group = optimizer.param_groups[0]

    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.9, 5e-4)
    scheduler.last_epoch = 99_998
    optimizer.step()
    scheduler.step()
    assert group["lr"] == 0.01
    scheduler.step()
    assert group["lr"] == pytest.approx(0.001)


def test_the_networks_of_a_recipe_are_there():
    assert set(RECIPES) <= set(MODELS)
