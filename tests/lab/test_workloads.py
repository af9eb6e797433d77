from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast_lab.workloads import MODELS, OPTIMIZERS, make_optimizer
from holdfast_lab.workloads.train import accuracy


@pytest.fixture
def torch_as_it_was():
    yield
    torch.use_deterministic_algorithms(False)


def test_an_unknown_optimizer_is_answered_with_the_known_ones():
    with pytest.raises(holdfast.ConfigError, match="optimizer must be one of sgd, adam, got 'adamw'"):
        make_optimizer("adamw", [])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_changes_what_it_is_given(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(name, [weight])

    weight.sum().backward()
    optimizer.step()

    assert (weight < 1).all()


def test_accuracy_is_the_share_of_right_answers_and_leaves_the_mode():
    scores = torch.eye(10)
    model = torch.nn.Identity().train()
    test = TensorDataset(scores.repeat(250, 1), torch.arange(10).where(torch.arange(10) < 7, 0).repeat(250))

    assert accuracy(model, test) == pytest.approx(0.7)
    assert model.training


@pytest.mark.usefixtures("torch_as_it_was")
def test_the_workload_trains_as_one_worker(monkeypatch):
    from holdfast_lab.workloads import train

    sessions = []
    make = holdfast.Session
    monkeypatch.setattr(holdfast, "Session", lambda *args, **kw: sessions.append(make(*args, **kw)) or sessions[-1])

    train.main(["--epochs", "3", "--model", "mlp", "--batch-size", "64"])

    assert sessions[0].step == 3 * 24
    assert sessions[0].metrics["loss"] < 1.0


def test_every_name_is_offered():
    assert MODELS == ("mlp", "cnn", "alexnet", "vgg16", "resnet18", "resnet50", "googlenet", "gpt")
    assert OPTIMIZERS == ("sgd", "adam")
