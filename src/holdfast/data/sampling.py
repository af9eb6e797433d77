"""The order of samples that a sampler of the script gives, drawn so that every worker and every resumed run has the same one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Sampler

from holdfast.data.plan import Ids
from holdfast.data.seeds import seed_of, seeded
from holdfast.errors import ConfigError

_DEPTH = 3
"""Levels of samplers within samplers whose generators are reseeded."""
_MOST, _MOST_PASSES = 1_000_000, 100
"""Largest length of an epoch, in samples and in passes over the dataset together; a longer one is taken to be endless."""


class SamplerOrder:
    """Draws the order of each epoch from a sampler.

    Random numbers that the sampler draws depend only on the seed and the epoch: the global generators of torch, NumPy
    and Python, and generators among the sampler's attributes, are seeded meanwhile and restored afterwards.

    Args:
        sampler: Yields indices of samples; with ``in_batches``, lists of them.
        size: Number of samples in the dataset.
        seed: The job's seed.
        in_batches: The sampler is a batch sampler.
    """

    def __init__(self, sampler: Iterable[Any], size: int, seed: int, *, in_batches: bool = False) -> None:
        self.size = size
        self._sampler = sampler
        self._seed = seed
        self._in_batches = in_batches
        self._orders: dict[int, Ids] = {}
        self._digest = (-1, 0)

    def __call__(self, epoch: int) -> Ids:
        """Return the indices of the samples of ``epoch``, in order.

        Raises:
            ConfigError: if the sampler yields anything but indices of the dataset, or nothing; or batches of several sizes.
        """
        if epoch not in self._orders:
            self._orders = {last: self._orders[last] for last in list(self._orders)[-1:]}  # of one epoch, to load ahead
            self._orders[epoch] = self._draw(epoch)
        return self._orders[epoch]

    def digest(self, epoch: int) -> int:
        """Return a digest of the order of ``epoch``, from 0 to 2**62 - 1."""
        if self._digest[0] != epoch:
            self._digest = (epoch, xxhash.xxh3_64_intdigest(self(epoch).tobytes()) >> 2)
        return self._digest[1]

    def first_batch_size(self, epoch: int) -> int:
        """Return the size of the first batch that the batch sampler yields in ``epoch``."""
        with _seeded(self._sampler, self._seed, epoch):
            return len(next(iter(self._sampler), ()))

    def _draw(self, epoch: int) -> Ids:
        with _seeded(self._sampler, self._seed, epoch):
            most = _MOST + _MOST_PASSES * self.size
            drawn = list(itertools.islice(self._sampler, most + 1))
        if len(drawn) > most:
            raise ConfigError(
                f"the sampler {type(self._sampler).__name__} yields more than {most} indices of a dataset of {self.size}"
                " samples: it must end, which ends the epoch"
            )
        if self._in_batches:
            _check_sizes(self._sampler, [len(batch) for batch in drawn])
            drawn = [index for batch in drawn for index in batch]
        return _as_ids(self._sampler, drawn, self.size)


def _as_ids(sampler: Any, drawn: list[Any], size: int) -> Ids:
    wrong: Any = None
    try:
        order = np.array([operator.index(wrong := index) for index in drawn], dtype=np.int64)
    except TypeError:
        order = np.array([-1], dtype=np.int64)
    else:
        if not len(order):
            raise ConfigError(f"the sampler {type(sampler).__name__} yields no samples")
        wrong = int(order.min() if order.min() < 0 else order.max())
    if order.min() < 0 or order.max() >= size:
        raise ConfigError(
            f"the sampler {type(sampler).__name__} must yield indices from 0 to {size - 1}, the samples of the dataset,"
            f" got {wrong!r:.60}"
        )
    return order


def _check_sizes(sampler: Any, sizes: list[int]) -> None:
    size = sizes[0] if sizes else 0
    if any(other != size for other in sizes[:-1]) or (sizes and sizes[-1] > size):
        raise ConfigError(
            f"the batch sampler {type(sampler).__name__} yields batches of {min(sizes)} to {max(sizes)} samples:"
            " all but the last must have one size, because a mini-batch is cut into slices of fixed sizes"
        )


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """Seed everything that the sampler may draw from, and restore it."""
    key = seed_of("sampler", seed, epoch)
    samplers, generators = _parts(sampler)
    for each in samplers:
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeded(key))
        for number, generator in enumerate(generators):
            stack.callback(_reseed(generator, seed_of("generator", key, number)))
        yield


def _parts(sampler: Any) -> tuple[list[Any], list[Any]]:
    """Return a sampler and the samplers among its attributes, and their generators."""
    generators: dict[int, Any] = {}
    level = [sampler]
    samplers = {id(sampler): sampler}
    for _ in range(_DEPTH):
        values = [value for each in level for _, value in sorted(getattr(each, "__dict__", {}).items())]
        generators |= {id(value): value for value in values if isinstance(value, _GENERATORS)}
        level = [value for value in values if _may_sample(value) and id(value) not in samplers]
        samplers |= {id(value): value for value in level}
    return list(samplers.values()), list(generators.values())


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _may_sample(value: Any) -> bool:
    return isinstance(value, Sampler) or hasattr(value, "set_epoch")


def _reseed(generator: Any, key: int) -> Callable[[], object]:
    """Seed a generator, and return a function that restores it."""
    restore: Callable[[], object]
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        before = bits.state
        bits.state = type(bits)(key).state
        return lambda: setattr(bits, "state", before)
    if isinstance(generator, torch.Generator):
        restore = functools.partial(generator.set_state, generator.get_state())
        generator.manual_seed(key)
    elif isinstance(generator, np.random.RandomState):
        restore = functools.partial(generator.set_state, generator.get_state(legacy=False))
        generator.seed(key)
    else:
        restore = functools.partial(generator.setstate, generator.getstate())
        generator.seed(key)
    return restore
