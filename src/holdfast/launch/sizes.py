"""Sizes of files, as options give them."""

from __future__ import annotations

from holdfast.errors import ConfigError

_NEVER = "off"
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9} | {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_in_bytes(text: str) -> int:
    """Return the size after which a file is full, as ``--events-max`` gives it; 0: never.

    Raises:
        ConfigError: if it is not ``off``, or a whole number above 0 with a unit.
    """
    if text == _NEVER:
        return 0
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not (unit and number.isascii() and number.isdecimal() and int(number)):
        raise ConfigError(
            f"--events-max must be {_NEVER}, or a whole number above 0 with one of {', '.join(_UNITS)}, got {text!r}"
        )
    return int(number) * _UNITS[unit]
