"""Strict reading: what is not exactly right is refused in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from holdfast.errors import ConfigError


def refuse(what: str) -> NoReturn:
    """Raise what says so.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(what)


def read_number(key: str, text: str) -> int:
    """Return a whole number of at least 0.

    Raises:
        ConfigError: if it is none.
    """
    # Not int(text) alone: it takes "1_0", " 1", "+1" and the digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        refuse(f"{key} must be a whole number of at least 0, got {text!r}")
    return int(text)


def read_seconds(key: str, text: str) -> float:
    """Return a number of seconds.

    Raises:
        ConfigError: if it is none.
    """
    if not (text.isascii() and text.replace(".", "", 1).isdigit() and len(text) <= 30):
        refuse(f"{key} must be a number from 0.001 to 1000000, got {text!r}")
    return float(text)


def check_keys(what: str, fields: Any, keys: Sequence[str]) -> None:
    """Make sure that ``fields`` is a JSON object with exactly these keys.

    Raises:
        ConfigError: if it is not.
    """
    if type(fields) is not dict:
        refuse(f"{what} must be a JSON object, got {fields!r:.60}")
    if odd := sorted(fields.keys() ^ set(keys)):
        refuse(f"{what} must have the keys {', '.join(keys)}; wrong or missing: {', '.join(odd)}")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object, for ``object_pairs_hook``.

    Raises:
        ConfigError: if a key is there twice.
    """
    for position, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:position]):
            refuse(f"the key {name!r} of a fault plan is given twice; give it once")
    return dict(pairs)
