"""Strict parsing: anything that is not exactly right is refused with a one-line message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any

from holdfast.errors import ConfigError, refuse


class FaultNotAllowed(ConfigError):
    """A value is not allowed. The caller may know the value by another name, so the message has placeholders for names.

    Args:
        what: The problem, with the names of values in braces, such as ``{keep_sign}``.
        values: Fill the empty braces, in order.
    """

    def __init__(self, what: str, *values: object) -> None:
        super().__init__(what, *values)
        self._what, self._values = what, values

    def __str__(self) -> str:
        return self.named(lambda name: _WORDS.get(name, name.replace("_", "-")))

    def named(self, name_of: Callable[[str], str]) -> str:
        """Return the message, with each value's name replaced by ``name_of`` of it."""
        names = {name: name_of(name) for _, name, _, _ in Formatter().parse(self._what) if name}
        return self._what.format(*self._values, **names)


_WORDS = {"count": "count of flips"}
"""Longer names for values whose own name is unclear outside the command line."""


def read_number(key: str, text: str) -> int:
    """Return an integer of at least 0; refuse anything else."""
    # Not int(text) alone, which accepts "1_0", " 1", "+1" and the digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        refuse(f"{key} must be a whole number of at least 0, got {text!r}")
    return int(text)


def read_seconds(key: str, text: str) -> float:
    """Return a number of seconds; refuse anything else."""
    if not (text.isascii() and text.replace(".", "", 1).isdigit() and len(text) <= 30):
        refuse(f"{key} must be a number from 0.001 to 1000000, got {text!r}")
    return float(text)


def check_keys(what: str, fields: Any, keys: Sequence[str]) -> None:
    """Refuse anything but a JSON object with exactly these keys."""
    if type(fields) is not dict:
        refuse(f"{what} must be a JSON object, got {fields!r:.60}")
    if odd := sorted(fields.keys() ^ set(keys)):
        refuse(f"{what} must have the keys {', '.join(keys)}; wrong or missing: {', '.join(odd)}")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object, for ``object_pairs_hook``; refuse a repeated key."""
    for position, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:position]):
            refuse(f"the key {name!r} of a fault plan is given twice; give it once")
    return dict(pairs)
