"""Parses times, sizes and speeds with units: ``90d``, ``1h30min``, ``140GB``, ``2GiB/s``, ``400Gbit/s``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from holdfast.errors import ConfigError

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S

_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S, "y": YEAR_S}
_PREFIXES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZES = {
    **{f"{prefix}B": 1000.0**power for prefix, power in _PREFIXES.items()},
    **{f"{prefix.upper()}iB": 1024.0**power for prefix, power in _PREFIXES.items() if prefix},
}
_SPEEDS = {
    **{f"{unit}/s": value for unit, value in _SIZES.items()},
    **{f"{prefix}bit/s": 1000.0**power / 8 for prefix, power in _PREFIXES.items()},
}
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_TIME_HELP = "a number of seconds, or one with us, ms, s, min, h, d, w or y, such as 250ms, 1h30min or 5y"
_SIZE_HELP = "a number of bytes, or one with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 140GB"
_SPEED_HELP = "a number of bytes per second, or one with MB/s, GB/s, GiB/s, Gbit/s and so on, such as 2GiB/s"


def parse_seconds(value: object, name: str) -> float:
    """Return a time in seconds; a year has 365.25 days.

    Args:
        value: A number of seconds, or text.
        name: Its name in an error.

    Raises:
        ConfigError: if it is not a time, or not finite.
    """
    text = _plain(value)
    parts = re.findall(rf"({_NUMBER})\s*([a-z]+)\s*", text)
    if parts and re.fullmatch(rf"(?:{_NUMBER}\s*[a-z]+\s*)+", text) and all(unit in _TIMES for _, unit in parts):
        return _finite(sum(float(number) * _TIMES[unit] for number, unit in parts), value, name, "a time", _TIME_HELP)
    return _parse(value, name, {}, "a time", _TIME_HELP)


def parse_bytes(value: object, name: str) -> float:
    """Return a size in bytes.

    Args:
        value: A number of bytes, or text.
        name: Its name in an error.

    Raises:
        ConfigError: if it is not a size, or not finite.
    """
    return _parse(value, name, _SIZES, "a size", _SIZE_HELP)


def parse_speed(value: object, name: str) -> float:
    """Return a speed in bytes per second.

    Args:
        value: A number of bytes per second, or text.
        name: Its name in an error.

    Raises:
        ConfigError: if it is not a speed, or not finite.
    """
    return _parse(value, name, _SPEEDS, "a speed", _SPEED_HELP)


def _plain(value: object) -> str:
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _parse(value: object, name: str, units: Mapping[str, float], what: str, help_text: str) -> float:
    found = re.fullmatch(rf"({_NUMBER})\s*([A-Za-z/]*)", _plain(value))
    if found is None or (found[2] and found[2] not in units):
        raise ConfigError(f"{name} must be {what}: {help_text}; got {value!r}")
    return _finite(float(found[1]) * units.get(found[2], 1.0), value, name, what, help_text)


def _finite(number: float, value: object, name: str, what: str, help_text: str) -> float:
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be {what}: {help_text}; got {value!r}")
    return number
