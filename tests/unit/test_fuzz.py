"""Each fuzzer for a moment, without guidance; ``make fuzz`` lets them run for an hour each."""

import random
import warnings

import pytest

from fuzz.found import FOUND
from fuzz.parsers import all_parsers

PARSERS = all_parsers()
ROUNDS = 80
INTERESTING = (
    *(b"", b"\0", b"\xff", b"-1", b"1e999", b"NaN", b"null", b"[", b"{}", b"\\ud800", b'"', b"9" * 25, b"9" * 5000),
)


def changed(rng: random.Random, seed: bytes) -> bytes:
    """Return ``seed`` with some bytes replaced, inserted, removed or repeated."""
    data = bytearray(seed)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((0, 1, 1, 4, 30)))
        data[at:end] = rng.choice((rng.randbytes(rng.randrange(4)), rng.choice(INTERESTING), data[at:end] * 2))
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
def test_no_bytes_harm_a_parser(name):
    parser, rng = PARSERS[name], random.Random(name)
    warnings.simplefilter("ignore")
    for data in (b"", *parser.seeds):
        parser.read(data)
    for number in range(ROUNDS):
        data = changed(rng, rng.choice(parser.seeds))
        try:
            parser.read(data)
        except Exception as error:
            raise AssertionError(f"round {number}: {name} cannot read {data!r}") from error


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzers_found_once_does_no_harm(name):
    warnings.simplefilter("ignore")
    for data in FOUND[name]:
        PARSERS[name].read(data)


RIGHT = """manifest safetensors fault-plan scenario events report skeleton stream-state injection npz torch-file hdf5 trace hosts
nodes environment request"""


@pytest.mark.parametrize("name", RIGHT.split())
def test_what_the_fuzzers_begin_with_is_right(name):
    assert all(PARSERS[name].read(seed) for seed in PARSERS[name].seeds)
