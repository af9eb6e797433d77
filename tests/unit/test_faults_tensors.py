"""Values of live tensors are altered where they lie, whatever their type of number and their strides."""

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.faults.alteration import Alteration, apply, draw
from holdfast.faults.flip import Flip
from holdfast.faults.formats import FORMATS
from holdfast.faults.tensors import MOST_LISTED, Tensors, alter, chosen


@pytest.mark.parametrize("name", list(FORMATS))
def test_exactly_the_drawn_bits_are_flipped_where_the_tensors_lie(name):
    dtype = getattr(torch, name)
    named = {
        "rows": torch.zeros(7, 5).to(dtype),
        "columns": torch.zeros(7, 5).to(dtype).t(),
        "strided": torch.zeros(6, 8).to(dtype)[::2, 1::3],
        "one": torch.zeros(()).to(dtype),
        "none": torch.zeros(0, 3).to(dtype),
    }
    values = Tensors(named)

    changes = draw(values, Alteration(count=60, seed=3))
    apply(values, changes)

    assert [place.count for place in values.places] == [35, 35, 9, 1, 0]
    bits = {"rows": 0, "columns": 0, "strided": 0, "one": 0, "none": 0}
    for path, tensor in named.items():
        plain = tensor.view(torch.uint8) if name == "bool" else tensor  # a copy of booleans has nothing but 0 and 1
        raw = np.frombuffer(plain.reshape(-1).view(torch.uint8).numpy().tobytes(), np.uint8)
        bits[path] = int(np.unpackbits(raw).sum())
    assert sum(bits.values()) == 60
    assert min(bits["rows"], bits["columns"], bits["strided"]) > 0
    for change in changes:
        assert values.read([(change.place, change.index)])[0].tobytes() == change.after.tobytes()


def test_what_is_altered_twice_is_as_it_was():
    tensor = torch.randn(50, 20).t()
    before = tensor.clone()
    values = Tensors({"a": tensor})

    for times in range(2):
        changes = draw(values, Alteration(count=40, bits="exponent", seed=1))
        apply(values, changes)
        assert torch.equal(tensor, before) == (times == 1)


def test_what_has_no_values_that_can_be_altered_is_left_out():
    named = {"sparse": torch.eye(3).to_sparse(), "complex": torch.zeros(3, dtype=torch.complex64), "a": torch.zeros(2)}

    assert [place.path for place in Tensors(named).places] == ["a"]


def test_autograd_does_not_notice_and_goes_back_through_what_lies_there():
    layer = nn.Linear(2, 1, bias=False)
    x = torch.ones(1, 2)
    hidden = layer(x).exp()

    alter({"hidden": hidden.detach()}, Flip("activations", Alteration(scale=2.0)))
    altered = hidden.item()
    hidden.sum().backward()

    assert layer.weight.grad.tolist() == [[altered, altered]], "exp goes back with its result, which was altered"


def test_a_few_values_are_listed_and_all_are_counted():
    listed, count = alter({"a": torch.ones(100, 10)}, Flip("weights", Alteration(percent=50, bits="31")))

    assert count == 500
    assert len(listed) == MOST_LISTED
    assert listed[0] == {"path": "a", "index": listed[0]["index"], "bit": 31, "before": 1.0, "after": -1.0}


NAMES = dict.fromkeys(["fc1.weight", "fc1.bias", "fc10.weight", "fc1/step"])


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ([], ["fc1.weight", "fc1.bias", "fc10.weight", "fc1/step"]),
        (["fc1"], ["fc1.weight", "fc1.bias", "fc1/step"]),
        (["fc1.weight"], ["fc1.weight"]),
        (["*.weight", "fc1.bias"], ["fc1.weight", "fc1.bias", "fc10.weight"]),
    ],
)
def test_a_name_is_a_path_its_beginning_or_a_pattern(patterns, found):
    assert list(chosen(NAMES, patterns)) == found


def test_a_name_that_fits_nothing_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError) as refused:
        chosen(NAMES, ["fc1", "fc"])

    assert str(refused.value) == (
        "at must equal, prefix or match one of fc1.weight, fc1.bias, fc10.weight, fc1/step, got 'fc'"
    )
