"""The remaining time of a study, estimated from its finished tasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

_WIDE = 1.5
"""The bounds of the remaining time are shown if their ratio is above this."""


class Pace:
    """Estimates the remaining time of a study.

    Args:
        task_s: Average seconds per task in a reference run on two cores.
        took_s: Seconds of each finished task of this run, by task name.
    """

    def __init__(self, task_s: float, took_s: Mapping[str, float]) -> None:
        self._task_s, self._took_s = task_s, took_s

    def share_and_left_s(self, keys: Sequence[str]) -> tuple[float, float]:
        """Return the share of the whole time that has passed if these tasks are left, and their estimated seconds."""
        left_s, passed_s = self._estimate(keys)[0], sum(self._took_s.values())
        return passed_s / (passed_s + left_s) if passed_s + left_s > 0 else 0.0, left_s

    def left(self, keys: Sequence[str]) -> str:
        """Return the estimated time of these tasks in words, with its bounds and what it is based on."""
        if not self._took_s:
            return f"about {_in_words(self._task_s * len(keys))}, estimated from a run on two cores"
        about_s, low_s, high_s = self._estimate(keys)
        bounds = f" ({_in_words(low_s)} to {_in_words(high_s)})" if high_s > _WIDE * low_s else ""
        return f"about {_in_words(about_s)}{bounds}, estimated from the {len(self._took_s)} finished"

    def _estimate(self, keys: Sequence[str]) -> tuple[float, float, float]:
        """Return the estimated seconds of these tasks, and their bounds."""
        kinds: dict[str, list[float]] = {}
        for key, taken_s in self._took_s.items():
            kinds.setdefault(kind_of(key), []).append(taken_s)
        every = [self._task_s, *self._took_s.values()]
        about_s, low_s, high_s = 0.0, 0.0, 0.0
        for kind, number in Counter(map(kind_of, keys)).items():
            known = kinds.get(kind)
            mean_s = statistics.fmean(known or every)
            about_s += number * mean_s
            if known is None:  # no task of this kind is finished yet: it may take as long as any other
                low_s, high_s = low_s + number * min(every), high_s + number * max(every)
            else:
                off_s = _off_s(known, number)
                low_s += max(number * mean_s - off_s, number * min(known))
                high_s += min(number * mean_s + off_s, number * max(known))
        return about_s, low_s, high_s


def _off_s(known: Sequence[float], number: int) -> float:
    """Return the uncertainty of the total of ``number`` more tasks: two standard errors of the difference."""
    if len(known) < 2:
        return 0.0
    return 2 * statistics.stdev(known) * math.sqrt(number + number**2 / len(known))


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5 * 3600 else f"{seconds / 3600:.0f} h"


def kind_of(key: str) -> str:
    """Return the kind of a task: its name up to the first colon."""
    return key.split(":")[0]
