"""Times, sizes and speeds with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast_lab.pages.words import duration
from holdfast_lab.simulate.units import parse_bytes, parse_seconds, parse_speed

TIMES_S = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365.25 * 86400}
PREFIXES = "", "k", "M", "G", "T", "P"
SIZES = {f"{prefix}B": 1000**power for power, prefix in enumerate(PREFIXES)}
SIZES |= {f"{prefix.upper()}iB": 1024**power for power, prefix in enumerate(PREFIXES) if prefix}
SPEEDS = {f"{unit}/s": size for unit, size in SIZES.items()}
SPEEDS |= {f"{prefix}bit/s": 1000**power / 8 for power, prefix in enumerate(PREFIXES)}

numbers = st.integers(0, 10**6) | st.floats(0, 1e6)
spaces = st.sampled_from(["", " "])


@given(st.lists(st.tuples(numbers, spaces, st.sampled_from(sorted(TIMES_S)), spaces), min_size=1, max_size=3))
def test_a_time_is_the_sum_of_numbers_with_units(parts):
    text = "".join(f"{number}{space}{unit}{behind}" for number, space, unit, behind in parts)

    seconds = sum(number * TIMES_S[unit] for number, _, unit, _ in parts)
    assert parse_seconds(text, "it") == pytest.approx(seconds, rel=1e-12)


@given(number=numbers, space=spaces, unit=st.sampled_from(sorted(SIZES)))
def test_a_size_and_a_speed_are_a_number_with_a_unit(number, space, unit):
    assert parse_bytes(f"{number}{space}{unit}", "it") == pytest.approx(number * SIZES[unit], rel=1e-12)
    assert parse_speed(f"{number}{space}{unit}/s", "it") == pytest.approx(number * SPEEDS[f"{unit}/s"], rel=1e-12)


@given(number=numbers, space=spaces, unit=st.sampled_from(sorted(SPEEDS)))
def test_a_speed_may_be_given_in_bits(number, space, unit):
    assert parse_speed(f"{number}{space}{unit}", "it") == pytest.approx(number * SPEEDS[unit], rel=1e-12)


@given(numbers)
def test_a_number_without_a_unit_is_one_of_seconds_or_bytes(number):
    for parse in (parse_seconds, parse_bytes, parse_speed):
        assert parse(number, "it") == parse(str(number), "it") == number


def test_numbers_may_be_written_in_every_usual_way():
    assert (parse_seconds("1.5e3s", "it"), parse_seconds(".5h", "it"), parse_seconds("2.h", "it")) == (1500, 1800, 7200)
    assert (parse_bytes("2GiB", "it"), parse_speed("400Gbit/s", "it")) == (2147483648, 50e9)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_seconds, "5 parsecs"),
        (parse_seconds, "140GB"),
        (parse_seconds, "-3s"),
        (parse_seconds, "3s and more"),
        (parse_seconds, "1h 30"),
        (parse_seconds, ""),
        (parse_seconds, "nan"),
        (parse_seconds, 1e400),
        (parse_seconds, True),
        (parse_seconds, None),
        (parse_bytes, "6h"),
        (parse_bytes, "3Gb"),
        (parse_bytes, "3GB/s"),
        (parse_speed, "3GB"),
        (parse_speed, "3Gb/s"),
    ],
)
def test_what_is_none_is_refused_with_what_is_allowed(parse, text):
    with pytest.raises(
        ConfigError, match=r"^costs\.x must be a (time|size|speed): a number of .* such as .*; got "
    ) as caught:
        parse(text, "costs.x")

    assert str(caught.value).endswith(repr(text))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5 * 365.25 * 86400, "5 y"),
        (264 * 86400, "264 d"),
        (77054, "21.4 h"),
        (1241.3, "20.7 min"),
        (90, "90 s"),
        (0.25, "250 ms"),
        (0, "0 s"),
        (float("inf"), "never"),
    ],
)
def test_a_time_is_said_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text
