"""Times, sizes and speeds with units."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast.report.formatting import duration
from holdfast_lab.simulate.units import parse_bytes, parse_seconds, parse_speed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5y", 5 * 365.25 * 86400),
        ("90d", 90 * 86400),
        ("2w", 14 * 86400),
        ("6h", 21600),
        ("1h30min", 5400),
        ("2 min 5 s", 125),
        ("30s", 30),
        ("250ms", 0.25),
        ("40us", 4e-5),
        ("1.5e3s", 1500),
        (".5h", 1800),
        ("12", 12),
        (12.5, 12.5),
        (0, 0),
    ],
)
def test_a_time_is_read_in_seconds(text, seconds):
    assert parse_seconds(text, "it") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [("140GB", 140e9), ("2GiB", 2 * 1024**3), ("1 KiB", 1024), ("3kB", 3000), ("7B", 7), ("1.5TB", 1.5e12), (9, 9)],
)
def test_a_size_is_read_in_bytes(text, size):
    assert parse_bytes(text, "it") == size


@pytest.mark.parametrize(
    ("text", "speed"), [("2GiB/s", 2 * 1024**3), ("100 MB/s", 1e8), ("400Gbit/s", 50e9), ("5e9", 5e9)]
)
def test_a_speed_is_read_in_bytes_a_second(text, speed):
    assert parse_speed(text, "it") == speed


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
