from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from holdfast.errors import ConfigError
from holdfast_lab.workloads.iterative import copy_of
from holdfast_lab.workloads.iterative.networks import RATES, SHARD, Adam, Momentum, make

OURS = {"adam": Adam, "momentum": Momentum}
LAYERS = {"mlp": 2, "cnn": 3, "gpt": 1 + 2 * 6 + 2}  # modules that hold parameters


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "input.txt").write_text("to be or not to be, that is the question. " * 100)
    return folder


def program(kind, optimizer, data, seed=0, **options):
    return make(f"gpt-{optimizer}" if kind == "gpt" else f"{kind}-{optimizer}-digits", data, seed, **options)


def torchs(optimizer, parameters, rate):
    if optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def after(some, iterations):
    state = some.start()
    for iteration in range(iterations):
        some.iterate(state, iteration)
    return state


def steps_of(optimizer, parameters, gradients):
    """Return where torch's optimizer goes from ``parameters``."""
    weight = torch.nn.Parameter(parameters.clone())
    reference = torchs(optimizer, [weight], 0.01)
    for gradient in gradients:
        weight.grad = gradient.clone()
        reference.step()
    return weight.detach()


@pytest.mark.parametrize("optimizer", OURS)
def test_an_optimizer_goes_to_the_bit_where_torchs_goes(optimizer):
    torch.manual_seed(0)
    parameters, gradients = torch.randn(40, SHARD), torch.randn(60, 40, SHARD) * torch.logspace(-6, 2, SHARD)
    ours = OURS[optimizer](0.01)
    state = {"parameters": parameters.clone()} | ours.begin(parameters)

    for gradient in gradients:
        ours.step(state, gradient)

    assert torch.equal(state["parameters"], steps_of(optimizer, parameters, gradients))


@pytest.mark.parametrize("optimizer", OURS)
def test_a_block_that_is_reset_goes_on_as_a_new_one_and_the_others_as_before(optimizer):
    torch.manual_seed(0)
    parameters, gradients = torch.randn(4, SHARD), torch.randn(30, 4, SHARD)
    ours = OURS[optimizer](0.01)
    state = {"parameters": parameters.clone()} | ours.begin(parameters)

    for number, gradient in enumerate(gradients):
        if number == 20:
            for tensor in state.values():
                tensor[1] = 0
            state["parameters"][1] = parameters[1]
        ours.step(state, gradient)

    expected = steps_of(optimizer, parameters, gradients)
    expected[1] = steps_of(optimizer, parameters[1], gradients[20:, 1])
    assert torch.equal(state["parameters"], expected)


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("mlp", "adam"), ("mlp", "momentum"), ("cnn", "adam"), ("gpt", "adam")]
)
def test_a_program_trains_as_a_plain_loop_does(kind, optimizer, data):
    some, other = (program(kind, optimizer, data) for _ in range(2))
    model = other.model(other.start())
    parameters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    reference = torchs(optimizer, parameters, some.optimizer.rate)
    names = [name for name, _ in model.named_parameters()]

    for iteration in range(20):
        inputs, labels = some.train[some.minibatch(iteration)]
        scores = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (inputs,))
        reference.zero_grad()
        F.cross_entropy(scores.flatten(0, -2), labels.flatten()).backward()
        reference.step()

    for ours, theirs in zip(some.model(after(some, 20)).parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("kind", "iterations"), [("mlp", 400), ("cnn", 300)])
def test_a_network_learns_the_digits(kind, iterations, data):
    some = program(kind, "adam", data)
    state = after(some, iterations)

    assert some.accuracy(state) > 0.95
    assert some.loss(state) < 0.1 < some.loss(some.start())


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("blocks", ["shards", "layers"])
def test_no_block_straddles_and_none_is_padded_but_at_its_end(kind, blocks, data):
    some = program(kind, "momentum" if kind != "gpt" else "adam", data, blocks=blocks)
    state = some.start()
    width = state["parameters"].shape[1]

    touched = []
    for block in range(some.blocks):
        state["parameters"].zero_()[block] = torch.arange(1, width + 1)
        found = {name: p.flatten() for name, p in some.model(state).named_parameters() if p.any()}
        values = torch.cat(list(found.values()))
        touched.append({name if blocks == "shards" else name.rpartition(".")[0] for name in found})
        values = values[values > 0]
        assert torch.equal(values, torch.arange(1.0, len(values) + 1))  # what is in no parameter is at the end
        buffers, steps = (2, 1) if "momentum" not in state else (1, 0)
        assert some.block_bytes[block] == 4 * (len(values) * (1 + buffers) + steps)
    assert {len(names) for names in touched} == {1}
    if blocks == "shards":
        assert width == SHARD
        assert sum(a != b for a, b in pairwise(touched)) == len(list(some.model(state).parameters())) - 1
    else:
        assert some.blocks == LAYERS[kind]


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_change_nothing_of_the_training(kind, data):
    by_shard, by_layer = (program(kind, "adam", data, blocks=blocks) for blocks in ("shards", "layers"))

    models = [some.model(after(some, 5)) for some in (by_shard, by_layer)]

    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_what_is_behind_the_last_parameter_stays_zero(data):
    some = program("mlp", "adam", data, blocks="layers")
    state = after(some, 5)
    head = 64 * 10 + 10

    assert state["parameters"][0].all()
    for tensor in some.rows(state)[:3]:
        assert tensor[1, :head].any()
        assert not tensor[1, head:].any()


def test_two_runs_of_a_program_do_not_know_of_each_other(data):
    some = program("mlp", "adam", data)
    alone = after(some, 6)
    branch = after(some, 3)
    other = copy_of(branch)
    other["parameters"][::2] = 0
    some.mend(other, torch.arange(0, some.blocks, 2))

    for iteration in range(3, 6):
        for state in (other, branch):
            some.iterate(state, iteration)
            some.loss(other)

    assert all(torch.equal(a, b) for a, b in zip(some.rows(alone), some.rows(branch), strict=True))
    assert some.distance(alone["parameters"], other["parameters"]).min() >= 0
    assert not torch.equal(alone["parameters"], other["parameters"])


def test_weights_and_minibatches_are_functions_of_the_seed(data):
    one, same, other = (program("mlp", "adam", data, seed) for seed in (0, 0, 1))

    after(same, 2)

    assert torch.equal(one.minibatch(5), same.minibatch(5))
    assert torch.equal(one.start()["parameters"], same.start()["parameters"])
    assert not torch.equal(one.minibatch(5), one.minibatch(6))
    assert not torch.equal(one.minibatch(5), other.minibatch(5))
    assert not torch.equal(one.start()["parameters"], other.start()["parameters"])
    assert one.train is other.train


def test_the_stated_rate_is_taken_unless_another_is_given(data):
    assert program("mlp", "momentum", data).optimizer.rate == RATES["mlp-momentum-digits"].stated
    assert program("mlp", "momentum", data, learning_rate=0.5).optimizer.rate == 0.5


@pytest.mark.parametrize("options", [{"batch": 0}, {"evaluated": 0}, {"learning_rate": 0.0}, {"blocks": "rows"}])
def test_what_is_out_of_range_is_answered_with_the_range(options, data):
    line = "batch and evaluated must be at least 1, learning_rate above 0, blocks one of shards, layers, got "

    with pytest.raises(ConfigError, match=line):
        program("mlp", "adam", data, **options)
