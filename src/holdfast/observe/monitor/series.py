"""A curve with a bounded number of points, however long the run: of each stretch, its lowest and its highest value stay."""

from __future__ import annotations

import math

MOST_POINTS = 600
"""Points of a curve."""

Point = tuple[int, float, float | None]
"""Step, seconds since the start, value; None if it is no finite number."""


class Series:
    """A curve that is thinned while it grows.

    Points are kept in stretches of equal length, two of each: the lowest and the highest. When there are too many
    stretches, each two become one.

    Args:
        most: Points that stay, at least 8.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = (most - 1) // 2  # stretches; one point is left for the newest
        self._length = 1  # points of a stretch
        self._stretches: list[tuple[Point, Point]] = []  # the lowest and the highest of each
        self._filled = 0  # points of the last stretch
        self._last: Point | None = None

    def add(self, step: int, t_s: float, value: float) -> None:
        """Add a point; a value that is no finite number counts as the highest."""
        shown = float(f"{value:.6g}") if math.isfinite(value) else None
        point = self._last = (step, round(t_s, 3), shown)
        if self._stretches and self._filled < self._length:
            self._stretches[-1] = _extremes(*self._stretches[-1], point)
            self._filled += 1
            return
        self._stretches.append((point, point))
        self._filled = 1
        if len(self._stretches) > self._most:
            self._thin()

    def points(self) -> list[Point]:
        """Return the points in the order in which they were added."""
        points: list[Point] = []
        for low, high in self._stretches:
            if low is high:
                points.append(low)
            else:
                points += (low, high) if low[1] <= high[1] else (high, low)
        if self._last is not None and points[-1] != self._last:
            points.append(self._last)
        return points

    def _thin(self) -> None:
        pairs = [self._stretches[place : place + 2] for place in range(0, len(self._stretches), 2)]
        self._filled += self._length if len(pairs[-1]) == 2 else 0
        self._stretches = [_extremes(*(point for stretch in pair for point in stretch)) for pair in pairs]
        self._length *= 2


def _extremes(*points: Point) -> tuple[Point, Point]:
    """Return the lowest and the highest point."""
    return min(points, key=_height), max(points, key=_height)


def _height(point: Point) -> float:
    return math.inf if point[2] is None else point[2]
