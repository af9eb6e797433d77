"""The method of the injector of 2022 (https://github.com/diepe28/hdf5_corrupter), reimplemented.

    python benchmarks/inject/injector_2022.py FILE FLIPS LOG

It does what the last version does with ``injection_type`` count, probability 1, 32-bit floats, all bits, NaN allowed
and random locations, without further options:

- ``hdf5_common.py``, ``get_hdf5_file_leaf_locations`` and ``count_hdf5_file_entries``: it opens the file and walks through
  all groups for the names, and once more to count the values.
- ``corrupter.py``, ``try_corrupt_hdf5_file``: in a loop over the flips, it seeds its generator by the clock, draws a name,
  looks that data set up, and reads and writes one value of it through h5py (``try_corrupt_dataset``).
- ``corrupter.py``, ``try_corrupt_value``, ``float_to_bin``, ``bin_to_float``: the bit is exchanged in a text of zeros and
  ones. The generator is seeded again before the position in the tensor is drawn, before the probability, and before the
  bit.
- ``hdf5_corrupter.py``, ``main``: it logs to a file at level DEBUG, which is fixed. That makes three lines for each
  flip, with the data set, the index, the bit, and the value before and after.

It seeds with a ``datetime``, which Python 3.11 and later refuse; here with its hash, which earlier versions used.
"""

from __future__ import annotations

import logging
import random
import struct
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import h5py
import numpy as np

WIDTH = 32


def leaves(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of everything that is not a group."""
    for name, thing in list(group.items()):
        path = f"{prefix}/{name}"
        if hasattr(thing, "items"):
            yield from leaves(thing, path)
        else:
            yield path


def seed_by_the_clock() -> None:
    """Seed the generator."""
    random.seed(hash(datetime.now()))


def to_text(value: np.float32) -> str:
    """Return the bits of a value as text, the sign first."""
    return "".join(f"{byte:b}".rjust(8, "0") for byte in struct.pack("!f", value))


def from_text(text: str) -> np.float32:
    """Return the value that the bits encode."""
    return np.float32(struct.unpack("!f", int(text, 2).to_bytes(4, "big"))[0])


def altered(value: np.float32, log: logging.Logger) -> np.float32:
    """Return a value with one bit flipped."""
    seed_by_the_clock()
    random.random()
    seed_by_the_clock()
    (bit,) = random.sample(range(WIDTH), 1)
    text = to_text(value)
    new = from_text(text[:bit] + ("1" if text[bit] == "0" else "0") + text[bit + 1 :])
    log.debug(f"bit {bit} of a float was altered: {value} --> {new}")
    return new


def corrupt(path: str, flips: int, log: logging.Logger) -> None:
    """Flip one bit of one value after another."""
    with h5py.File(path, "r") as file:
        names = list(leaves(file))
    with h5py.File(path, "r") as file:
        log.info("values: %d", sum(int(np.prod(file[name].shape)) for name in leaves(file)))
    with h5py.File(path, "a") as file:
        for _ in range(flips):
            seed_by_the_clock()
            name = names[random.randint(0, len(names) - 1)]
            log.debug(f"altering {name}")
            dataset = file.get(name)
            seed_by_the_clock()
            index = tuple(random.randint(0, size - 1) for size in dataset.shape)
            log.debug(f"at {index}")
            dataset[index] = altered(dataset[index], log)


def logger(path: str) -> logging.Logger:
    """Return a logger that writes each line to a file immediately."""
    log = logging.getLogger("injector")
    for old in log.handlers[:]:
        log.removeHandler(old)
        old.close()
    handler = logging.FileHandler(path, "w")
    handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    return log


if __name__ == "__main__":
    corrupt(sys.argv[1], int(sys.argv[2]), logger(sys.argv[3]))
