"""The sum that keeps no order: all else of a session stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.errors import ConfigError
from holdfast_lab.studies.exact.unordered import sum_unordered


def trained(add=None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), slices=1)
    if add is not None:
        sum_unordered(session, add)
    samples = TensorDataset(torch.randn(12, 3), torch.randn(12, 2))
    for step in session.steps(samples, 4, epochs=1):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_what_adds_decides_and_the_mean_is_taken_afterwards():
    given = []

    assert torch.equal(trained(lambda sums: given.append(sums.numel())), trained())
    assert len(given) == 3  # of one bucket, once a step
    assert not torch.equal(trained(lambda sums: sums[0].mul_(2.0)), trained())  # of all, their count too


def test_a_split_model_is_refused():
    session = holdfast.Session(
        holdfast.Sharded(nn.Linear(3, 2)), lambda parameters: torch.optim.SGD(parameters, lr=0.1), slices=1
    )

    with pytest.raises(ConfigError, match="split"):
        sum_unordered(session, lambda sums: None)
