"""Number formats, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.faults.formats import FORMATS

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WHOLE = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def bits_of(format):
    """All patterns of up to 16 bits, else many of them."""
    if format.bits <= 16:
        return np.arange(1 << format.bits, dtype=format.raw)
    return np.random.default_rng(0).integers(0, 1 << format.bits, 20_000, dtype=format.raw)


def in_torch(format, raw):
    return torch.from_numpy(raw.view(WHOLE[format.bits]).copy()).view(getattr(torch, format.name))


@pytest.mark.parametrize("name", FLOATS)
def test_every_pattern_of_bits_means_what_it_means_to_torch(name):
    format = FORMATS[name]
    raw = bits_of(format)
    wanted = in_torch(format, raw).double().numpy()

    values = format.values(raw)

    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(np.signbit(values[known]), np.signbit(wanted[known]))
    np.testing.assert_array_equal(format.is_finite(raw), np.isfinite(wanted))
    np.testing.assert_array_equal(format.raw_of(values)[known], raw[known])
    assert not format.is_finite(format.raw_of(values)[~known]).any()


@pytest.mark.parametrize("name", FLOATS[1:])
def test_values_become_what_torch_makes_of_them_ties_too(name):
    format = FORMATS[name]
    known = format.values(bits_of(format))
    known = np.unique(known[np.isfinite(known)])
    near = np.concatenate([known, (known[1:] + known[:-1]) / 2]).astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(9e9)), np.nextafter(near, np.float32(-9e9))])
    near = near[np.abs(near) <= known[-1]]  # beyond it torch's float8 stays finite, in some versions

    raw = format.raw_of(near.astype(np.float64))

    wanted = torch.from_numpy(near).to(getattr(torch, name)).view(torch.from_numpy(raw.view(WHOLE[format.bits])).dtype)
    np.testing.assert_array_equal(raw, wanted.numpy().view(format.raw))


def test_a_value_is_rounded_once():
    """By way of float32 the first would become a tie, and go down."""
    raw = FORMATS["bfloat16"].raw_of(np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8]))

    assert raw.tolist() == [0x3F81, 0x3F80, 0x3F82]


@pytest.mark.parametrize(
    ("name", "value", "raw"),
    [
        ("float32", 3.5e38, 0x7F800000),
        ("bfloat16", -3.4e38, 0xFF80),
        ("float8_e5m2", 61441, 0x7C),
        ("float8_e4m3fn", 464, 0x7E),
        ("float8_e4m3fn", 465, 0x7F),  # NaN: it has no infinity
        ("int8", 127.5, 127),
        ("int8", -1e9, 0x80),
        ("uint8", -3, 0),
        ("int64", 9.3e18, 2**63 - 1),
        ("uint64", 1e30, 2**64 - 1),
        ("bool", 2, 1),
    ],
)
def test_what_is_too_large_becomes_infinite_or_the_largest(name, value, raw):
    assert FORMATS[name].raw_of(np.array([value], np.float64)).tolist() == [raw]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("float64", {"sign": (63, 63), "exponent": (52, 62), "critical": (62, 62), "mantissa": (0, 51)}),
        ("float32", {"sign": (31, 31), "exponent": (23, 30), "critical": (30, 30), "mantissa": (0, 22)}),
        ("float16", {"sign": (15, 15), "exponent": (10, 14), "critical": (14, 14), "mantissa": (0, 9)}),
        ("bfloat16", {"sign": (15, 15), "exponent": (7, 14), "critical": (14, 14), "mantissa": (0, 6)}),
        ("float8_e5m2", {"sign": (7, 7), "exponent": (2, 6), "critical": (6, 6), "mantissa": (0, 1)}),
        ("int32", {"sign": (31, 31), "exponent": (0, -1), "all": (0, 31)}),
        ("uint8", {"sign": (0, -1), "all": (0, 7)}),
    ],
)
def test_bits_are_counted_from_the_least_significant(name, fields):
    assert {field: FORMATS[name].range_of(field) for field in fields} == fields


def test_the_critical_bit_does_what_the_papers_say():
    """Of a float32: 0.01 becomes 3.4e36, 1.0 infinite, 1.5 NaN, 2 becomes 0 and 0 becomes 2; of a float16, 0.01 655.5."""
    single, half = FORMATS["float32"], FORMATS["float16"]
    raw = single.raw_of(np.array([0.01, 1.0, 1.5, 2.0, 0.0])) ^ np.uint32(1 << 30)

    values = single.values(raw)

    assert values[0] == pytest.approx(3.4e36, rel=0.01)
    np.testing.assert_array_equal(values[1:], [np.inf, np.nan, 0.0, 2.0])
    assert half.values(half.raw_of(np.array([0.01])) ^ np.uint16(1 << 14)) == pytest.approx(655.5, rel=0.001)
