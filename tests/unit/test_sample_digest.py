"""A digest of samples: equal where the data are, and none where samples may legitimately differ."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from holdfast.data.loader import DataSource
from holdfast.data.sample_digest import sample_digest
from holdfast.data.seeds import generator_states


class Made(Dataset):
    """Samples by a function of the index."""

    def __init__(self, make, size=8):
        self.make, self.size, self.loads = make, size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loads += 1
        return self.make(index)


def digest(dataset, **loading):
    return sample_digest(DataSource(dataset, **loading), len(dataset))


def numbers(seed):
    return torch.randn(1000, 3, generator=torch.Generator().manual_seed(seed))


def texts(index):
    return {"label": "cat", "x": np.arange(3) + index, "more": (1, None, 2.5, b"ab")}


@pytest.mark.parametrize(
    "of",
    [
        lambda seed: TensorDataset(numbers(seed), torch.arange(1000)),
        lambda seed: Subset(TensorDataset(numbers(seed)), range(1000)),
        lambda seed: ConcatDataset([TensorDataset(numbers(0)), TensorDataset(numbers(seed))]),
        lambda seed: [(row, 1) for row in numbers(seed)],
        lambda seed: Made(numbers(seed).__getitem__),
        lambda seed: Made(lambda index: texts(index + seed)),
    ],
)
def test_it_is_that_of_the_content(of):
    assert digest(of(1)) == digest(of(1)) >= 0
    assert digest(of(1)) != digest(of(2))


def test_augmentation_by_the_global_generators_is_the_same_everywhere_and_draws_nothing_from_them():
    def augmented(index):
        return torch.rand(2), np.random.rand(), random.random()

    torch.manual_seed(3)
    before = generator_states()
    one = digest(Made(augmented))
    assert generator_states() == before
    torch.rand(5), np.random.rand(5)
    assert one == digest(Made(augmented)) >= 0


def test_samples_that_differ_each_time_have_none():
    own = random.Random(1)

    assert digest(Made(lambda index: own.random() < 0.5)) == -1
    assert digest(Made(lambda index: time.monotonic_ns())) == -1


def test_a_dataset_of_the_script_is_loaded_only_where_that_costs_little():
    slow = Made(lambda index: time.sleep(0.03) or 1)
    assert digest(slow) == -1
    assert slow.loads == 1

    in_loader_processes = Made(lambda index: 1)
    assert digest(in_loader_processes, num_workers=1) == -1
    assert in_loader_processes.loads == 0
    assert digest(TensorDataset(numbers(0)), num_workers=1) == digest(TensorDataset(numbers(0)))


def test_what_cannot_be_loaded_has_none():
    assert digest(Made(lambda index: 1 // 0)) == -1
    assert sample_digest(DataSource([]), 0) == -1
    assert sample_digest(DataSource(iter([1])), -1) == -1


def test_places_on_a_machine_do_not_count():
    assert digest(Made(lambda index: ("/node1/a.jpg", 5))) == digest(Made(lambda index: ("/node2/a.jpg", 5))) >= 0
    assert digest(Made(lambda index: ("/node1/a.jpg", 5))) != digest(Made(lambda index: ("/node1/a.jpg", 6)))
