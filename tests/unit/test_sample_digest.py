"""A digest of samples: equal where the data in memory are, and none where reading them would run the script's code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from holdfast.data.loader import DataSource
from holdfast.data.sample_digest import sample_digest


class Own(Dataset):
    """A dataset of the script, which counts its loads."""

    def __init__(self, size=8):
        self.size, self.loads = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loads += 1
        return torch.ones(2)


class OwnList(list):
    def __getitem__(self, index):
        raise AssertionError


def digest(dataset, **loading):
    return sample_digest(DataSource(dataset, **loading), len(dataset))


def numbers(seed):
    return torch.randn(1000, 3, generator=torch.Generator().manual_seed(seed))


def records(seed):
    return [{"label": "cat", "x": np.arange(3) + i + seed, "more": (1, None, 2.5, b"ab")} for i in range(300)]


@pytest.mark.parametrize(
    "of",
    [
        lambda seed: TensorDataset(numbers(seed), torch.arange(1000)),
        lambda seed: TensorDataset(torch.arange(1000), numbers(seed)),
        lambda seed: Subset(TensorDataset(numbers(seed)), range(1000)),
        lambda seed: Subset(TensorDataset(numbers(0)), list(range(seed, 900))),
        lambda seed: ConcatDataset([TensorDataset(numbers(0)), TensorDataset(numbers(seed))]),
        lambda seed: StackDataset(x=numbers(0), y=TensorDataset(numbers(seed))),
        lambda seed: numbers(seed),
        lambda seed: numbers(seed).numpy(),
        lambda seed: [(row, 1) for row in numbers(seed)],
        lambda seed: [[seed, 2], [3, 4]],
        records,
        lambda seed: tuple(f"word {seed + i}" for i in range(9)),
    ],
)
def test_it_is_that_of_the_content(of):
    assert digest(of(1)) == digest(of(1)) >= 0
    assert digest(of(1)) != digest(of(2))
    assert digest(of(1)) == digest(of(1), num_workers=2)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda own: own,
        lambda own: Subset(own, [0, 1]),
        lambda own: ConcatDataset([TensorDataset(numbers(0)), own]),
        lambda own: StackDataset(TensorDataset(numbers(0)[:8]), own),
    ],
)
def test_a_dataset_of_the_script_is_never_loaded(wrap):
    own = Own()

    assert digest(wrap(own)) == -1
    assert own.loads == 0


def test_code_of_the_script_is_not_run_by_what_holds_the_data():
    assert digest(OwnList([1, 2])) == -1
    assert digest(Subset(numbers(0), OwnList([1, 2]))) == -1


def test_what_cannot_be_read_has_none():
    assert sample_digest(DataSource([]), 0) == -1
    assert sample_digest(DataSource(iter([1])), -1) == -1
    assert sample_digest(DataSource([1, 2]), 3) == -1
    assert digest(torch.eye(3).to_sparse()) == -1


def test_places_on_a_machine_do_not_count():
    assert digest([("/node1/a.jpg", 5)]) == digest([("/node2/a.jpg", 5)]) >= 0
    assert digest([("/node1/a.jpg", 5)]) != digest([("/node1/a.jpg", 6)])
    assert digest([{object(): 1}, object()]) == digest([{object(): 1}, object()]) >= 0, "an address is not its value"


def test_of_large_data_a_part_is_read_that_shows_another_order_and_other_values():
    large = torch.arange(1 << 23, dtype=torch.int64).view(64, -1)  # 64 MiB
    long = [list(range(5000))]

    assert digest(large) == digest(large.clone()) != digest(large.flip(0))
    assert digest(large) != digest(large + 1)
    assert digest(large) != digest(large.double())
    assert digest(long) != digest([list(range(5001))])
