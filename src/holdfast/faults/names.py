"""Selecting tensors by their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from holdfast.faults.reading import FaultNotAllowed


def chosen(named: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """Return the entries whose path matches a pattern.

    Args:
        named: Entries by path.
        patterns: Paths, prefixes of paths that end before a dot or a slash, or patterns with ``*``, ``?`` and ``[]``.
            Empty: all entries.

    Raises:
        NotAllowed: if a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(_fits(path, pattern) for path in named):
            shown = ", ".join(list(named)[:8]) + (", ..." if len(named) > 8 else "")
            raise FaultNotAllowed(
                "{at} must equal, prefix or match one of {}, got {!r}", shown or "no name: there is nothing", pattern
            )
    return {path: what for path, what in named.items() if not patterns or any(_fits(path, p) for p in patterns)}


def _fits(path: str, pattern: str) -> bool:
    return path == pattern or path.startswith((f"{pattern}.", f"{pattern}/")) or fnmatchcase(path, pattern)
