"""Readable text from numbers, durations and names."""

from __future__ import annotations

from collections.abc import Sequence

DASH = "\u2013"
"""Replaces a missing number."""
MINUS = "\u2212"

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def seconds(value: float | None) -> str:
    """Return a readable duration: ``"52 ms"``, ``"1.3 s"``, ``"2 min 5 s"``, or a dash."""
    if value is None:
        return DASH
    if value < 0.0095:
        return f"{value * 1e3:.1f} ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def rough(value: float) -> str:
    """Return a duration in whole units that does not flicker while it is counted: ``"9 s"``, ``"2 min 5 s"``, ``"3 d 4 h"``."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 86400} d {whole % 86400 // 3600} h" if whole >= 86400 else seconds(whole)


def timer(value: float) -> str:
    """Return a duration as a clock shows it: ``"0:07"``, ``"12:30"``, ``"1:02:03"``."""
    minutes, whole = divmod(max(0, int(value)), 60)
    return f"{minutes}:{whole:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{whole:02}"


def speed(steps_per_s: float | None) -> str:
    """Return ``"9.8 steps/s"``, or ``"12.5 s a step"`` if a step takes longer than a second; "" if it is not known."""
    if not steps_per_s:
        return ""
    if steps_per_s < 1:
        return f"{seconds(1 / steps_per_s)} a step"
    return f"{steps_per_s:.3g} steps/s" if steps_per_s < 100 else f"{steps_per_s:,.0f} steps/s"


def plain(value: float) -> str:
    """Return the label of an axis tick: as few digits as possible, and a real minus sign."""
    return f"{value:g}".replace("-", MINUS)


def percent(value: float | None, *, signed: bool = False, digits: int = 1) -> str:
    """Return a fraction in percent, or a dash."""
    if value is None:
        return DASH
    text = f"{abs(value) * 100:.{digits}f}"
    zero = float(text) == 0
    sign = "" if zero else MINUS if value < 0 else "+" if signed else ""
    return f"{sign}{text} %"


def clean(text: object) -> str:
    """Return text on one line, control characters escaped: names from scripts and files may hold terminal sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def size(size_bytes: float | None) -> str:
    """Return a size in decimal units, such as ``12.3 MB``; ``-`` if it is not known."""
    if size_bytes is None:
        return "-"
    value, unit = float(size_bytes), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with commas between thousands, or a dash."""
    if value is None:
        return DASH
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def count(amount: int, what: str) -> str:
    """Return ``"1 worker"``, ``"4 workers"``."""
    return f"{number(amount)} {what}{'' if amount == 1 else 's'}"


def listing(items: Sequence[object]) -> str:
    """Return ``"1"``, ``"1 and 2"``, ``"1, 2 and 3"``."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
