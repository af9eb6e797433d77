"""What a script may train on: a DataLoader is taken apart, its samplers are drawn alike everywhere, and what cannot be done is said."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from data_training import KILLS, train
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import holdfast
from holdfast.data.samples import fetch
from holdfast.errors import ConfigError, ScriptError

SAMPLES, BATCH = 50, 8


class Numbered(Dataset):
    """Samples with their own number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return torch.full((3,), float(number)), number


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, True)])
def test_a_data_loader_is_the_dataset_with_its_arguments(shuffle, drop_last):
    loader = DataLoader(Numbered(), BATCH, shuffle=shuffle, drop_last=drop_last)

    taken = train(loader, kills=KILLS)

    assert taken == train(Numbered(), BATCH, options={"shuffle": shuffle, "drop_last": drop_last})
    assert taken.account == ((96,) * 2 if drop_last else (100,) * 2) + (0, 0)


def test_an_argument_beside_a_data_loader_is_refused():
    for name, value in {"batch_size": 8, "shuffle": False, "drop_last": True, "num_workers": 0}.items():
        with pytest.raises(ConfigError, match=f"{name} is set in the DataLoader"):
            train(DataLoader(Numbered(), BATCH), options={name: value})
    with pytest.raises(ConfigError, match="batch_size is missing"):
        train(Numbered())


class Backwards(Sampler):
    """Yields the samples from the last one down, and one of them twice; tells torch nothing of its length."""

    def __iter__(self):
        return iter([*reversed(range(SAMPLES)), 7])


class Shuffled(Sampler):
    """Shuffles with generators of all kinds of its own, from which it goes on drawing."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator(), np.random.default_rng()
        self.old, self.python = np.random.RandomState(), random.Random()

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=self.torch).tolist()
        order = self.numpy.permutation(order).tolist()
        self.old.shuffle(order)
        self.python.shuffle(order)
        random.shuffle(order)
        return iter(order)


class OfEpoch(Sampler):
    """Has as many samples as the epoch says."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 + 3 * self.epoch))


WEIGHTS = torch.arange(1.0, SAMPLES + 1)
SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 60),
    "weighted with a generator": lambda: WeightedRandomSampler(WEIGHTS, 60, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(5, 38)),
    "replacement": lambda: RandomSampler(range(SAMPLES), replacement=True, num_samples=120),
    "more than once": lambda: RandomSampler(range(SAMPLES), num_samples=120),
    "backwards": Backwards,
    "own generators": Shuffled,
    "lengths by epoch": OfEpoch,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_of_a_sampler_does_not_depend_on_deaths_or_on_what_was_drawn_before(name):
    torch.manual_seed(1)
    undisturbed = train(DataLoader(Numbered(), BATCH, sampler=SAMPLERS[name]()))
    torch.manual_seed(2)

    disturbed = train(DataLoader(Numbered(), BATCH, sampler=SAMPLERS[name]()), kills=KILLS[:1])

    assert disturbed == undisturbed
    number = len(disturbed.samples)
    assert disturbed.account == (number, number, 0, 0)


def test_each_epoch_has_an_order_of_its_own():
    trained = train(DataLoader(Numbered(), BATCH, sampler=Shuffled()))
    first, second = trained.samples[:SAMPLES], trained.samples[SAMPLES:]

    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    assert train(DataLoader(Numbered(), BATCH, sampler=Shuffled()), seed=4).samples != trained.samples


def test_a_sampler_with_replacement_is_counted_to_the_sample():
    loader = DataLoader(Numbered(), BATCH, sampler=SAMPLERS["replacement"]())

    kill = "kill:rank=1,step=2,phase=allreduce,bucket=0"
    lost = train(loader, kills=[kill], strategy="forward", bucket_bytes=4)

    assert max(Counter(lost.samples).values()) > 7, "samples are drawn many times"
    assert lost.account == (240, 238, 2, 0), "forward loses the slice of the dead worker"


def test_the_generators_of_a_sampler_and_of_the_script_are_as_they_were():
    sampler = Shuffled()
    before = [sampler.torch.get_state().tolist(), sampler.numpy.bit_generator.state, sampler.python.getstate()]

    train(DataLoader(Numbered(), BATCH, sampler=sampler))

    after = [sampler.torch.get_state().tolist(), sampler.numpy.bit_generator.state, sampler.python.getstate()]
    assert after == before


class InBatches(Sampler):
    """Batches of neighbours, of given sizes."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        first = 0
        for size in self.sizes:
            yield list(range(first, first + size))
            first += size


def test_batch_samplers_are_honoured_where_all_batches_have_one_size():
    plain = DataLoader(Numbered(), batch_sampler=BatchSampler(SequentialSampler(range(SAMPLES)), BATCH, drop_last=True))
    own = DataLoader(Numbered(), batch_sampler=InBatches(7, 7, 7, 3))

    assert train(plain) == train(Numbered(), BATCH, options={"shuffle": False, "drop_last": True})
    trained = train(own, kills=KILLS[:1])
    assert [len(numbers) for numbers in trained.steps.values()] == [7, 7, 7, 3] * 2
    assert trained.samples == list(range(24)) * 2


class Own(DataLoader):
    """A loader that makes something else of its batches."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("loader", "line"),
    [
        (lambda: DataLoader(Numbered(), batch_sampler=InBatches(3, 7)), "batches of 3 to 7 samples: all but the last"),
        (lambda: DataLoader(Numbered(), BATCH, sampler=[1, SAMPLES]), f"from 0 to {SAMPLES - 1}.* got {SAMPLES}"),
        (lambda: DataLoader(Numbered(), BATCH, sampler=[-1]), r"from 0 to \d+.* got -1"),
        (lambda: DataLoader(Numbered(), BATCH, sampler=["a"]), "must yield indices .* got 'a'"),
        (lambda: DataLoader(Numbered(), BATCH, sampler=[1.5]), "must yield indices .* got 1.5"),
        (lambda: DataLoader(Numbered(), BATCH, sampler=[]), "the sampler list yields no samples"),
        (lambda: Own(Numbered(), BATCH), "Own has an __iter__ of its own, which cannot be taken apart"),
        (lambda: DataLoader(Numbered(), batch_size=None), "batch_size=None does not make batches"),
    ],
)
def test_what_cannot_be_honoured_is_one_line_at_the_start(loader, line):
    with pytest.raises(ConfigError, match=line) as raised:
        train(loader())

    assert "\n" not in str(raised.value)


def test_an_endless_sampler_is_refused(monkeypatch):
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield 1

    monkeypatch.setattr("holdfast.data.sampling._MOST", 1000)
    with pytest.raises(ConfigError, match=r"Endless yields more than 6000 indices .* must end"):
        train(DataLoader(Numbered(), BATCH, sampler=Endless()))


def test_a_distributed_sampler_stands_for_the_whole_order(capsys):
    def loader(shuffle):
        return DataLoader(Numbered(), 2, sampler=DistributedSampler(Numbered(), 4, 1, shuffle=shuffle))

    for shuffle in (True, False):
        assert train(loader(shuffle)) == train(Numbered(), 8, options={"shuffle": shuffle})
    assert capsys.readouterr().err.count("a mini-batch has 2 x 4 = 8 samples over all workers") == 2


class Opened(Numbered):
    """Must be opened by ``worker_init_fn``; notes in which process a sample was loaded."""

    opened = 0

    def __getitem__(self, number):
        return number, self.opened, os.getpid()


def open_it(number):
    get_worker_info().dataset.opened = 100 + number


def test_loader_processes_and_their_function_are_honoured():
    loader = DataLoader(
        Opened(),
        BATCH,
        num_workers=2,
        worker_init_fn=open_it,
        prefetch_factor=3,
        timeout=60,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    seen = []

    def numbers(inputs):
        seen.append((set(inputs[1].tolist()), set(inputs[2].tolist())))
        return inputs[0]

    assert train(loader, numbers=numbers).account == (100, 100, 0, 0)
    assert {opened for some, _ in seen for opened in some} == {100, 101}
    assert os.getpid() not in {process for _, some in seen for process in some}


@dataclass
class Pair:
    """A batch of a script's own class."""

    x: torch.Tensor
    number: torch.Tensor


class Row(NamedTuple):
    """A sample with names."""

    x: torch.Tensor
    more: dict


@pytest.mark.parametrize("kind", ["dict", "named tuple", "dataclass", "nested list"])
def test_a_batch_is_what_the_collate_function_returns(kind):
    class Rows(Numbered):
        def __getitem__(self, number):
            x = torch.full((3,), float(number))
            made = {"dict": {"x": x, "y": {"number": number}}, "named tuple": Row(x, {"number": number})}
            return made.get(kind, [x, [number, (number,)]])

    def pair(samples):
        return Pair(torch.stack([x for x, _ in samples]), torch.tensor([number for _, (number, _) in samples]))

    ways = {
        "dict": lambda batch: batch["y"]["number"],
        "named tuple": lambda batch: batch.more["number"],
        "dataclass": lambda batch: batch.number,
        "nested list": lambda batch: batch[1][1][0],
    }
    loader = DataLoader(Rows(), BATCH, collate_fn=pair if kind == "dataclass" else None)

    assert train(loader, kills=KILLS, numbers=ways[kind]).samples == train(loader, numbers=ways[kind]).samples


def test_compute_says_that_it_needs_tuples():
    class Rows(Numbered):
        def __getitem__(self, number):
            return {"x": torch.ones(3), "y": torch.ones(1)}

    model = torch.nn.Linear(3, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=1e-3), workers=2)
    step = next(iter(session.steps(DataLoader(Rows(), BATCH))))
    with pytest.raises(ScriptError, match=r"step.compute and step.evaluate need a dataset of tuples.* got dict"):
        step.compute(model, torch.nn.functional.mse_loss)


def test_a_run_is_not_resumed_with_another_order(tmp_path):
    class Changing(Sampler):
        first = 0

        def __iter__(self):
            return iter(np.roll(np.arange(SAMPLES), self.first).tolist())

    def run(**settings):
        return train(
            DataLoader(Numbered(), BATCH, sampler=Changing()), checkpoint_dir=str(tmp_path), epochs=1, **settings
        )

    with pytest.raises(SystemExit):
        run(stop_after=2)
    rest = run(resume=True)
    assert rest.samples == list(range(24, SAMPLES))

    Changing.first = 5
    another = "the sampler gives another order of epoch 0 than when the checkpoint was made"
    with pytest.raises(ConfigError, match=another):
        run(resume=True)
    with pytest.raises(ConfigError, match=another):
        train(DataLoader(Numbered(), BATCH), checkpoint_dir=str(tmp_path), epochs=1, resume=True)


def test_a_sampler_within_a_sampler_knows_the_epoch():
    class Wrapping(Sampler):
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            numbers = list(self.sampler)
            return iter([numbers[:5], numbers[5:10]])

    trained = train(DataLoader(Numbered(), batch_sampler=Wrapping(OfEpoch())))
    assert trained.samples == list(range(10)) * 2


def test_a_tensor_dataset_keeps_its_fast_way():
    data = TensorDataset(torch.arange(float(SAMPLES)), torch.arange(SAMPLES))

    assert train(DataLoader(data, BATCH, shuffle=True)) == train(data, BATCH)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bfloat16, torch.bool])
def test_a_tensor_dataset_of_any_type_is_indexed(dtype):
    numbers = torch.arange(SAMPLES).to(dtype)
    ids = np.array([3, 0, 3, 49])

    (found,) = fetch(TensorDataset(numbers), ids, None)

    assert found.dtype == dtype
    assert found.tolist() == numbers[ids].tolist()
