"""How many spares are worth their price: the number with which a worker-hour gives the most work."""

from __future__ import annotations

import math

import numpy as np

SPLITS = ("slices", "even")
"""How survivors share the work of missing workers."""

_SIGMAS = 9
"""Numbers of nodes down that lie further from their mean are too rare to count."""
_COARSE = 64
"""Numbers of spare nodes that are tried at once; then those between the best one's neighbours."""


def worthwhile_spares(workers: int, per_node: int, down: float, split: str) -> int:
    """Return the spare workers, in whole nodes, with which a worker-hour gives the most work; 0 if none are worth it.

    Spares are counted in the worker-hours, and fail as the others do.

    Args:
        workers: Active workers.
        per_node: Workers of one node.
        down: Share of the time in which a node is down, below 1.
        split: One of :data:`SPLITS`.
    """
    nodes = -(-workers // per_node)
    if down <= 0:
        return 0
    mean = nodes * down / (1 - down)
    first, last = 0, math.ceil(mean + _SIGMAS * math.sqrt(mean) + _SIGMAS)
    while True:
        step = max(1, (last - first) // _COARSE)
        tried = sorted({0, *range(first, last + 1, step), last})
        # of equally good numbers the smallest
        best = max(tried, key=lambda spare: (round(work_per_worker(workers, per_node, spare, down, split), 9), -spare))
        if step == 1:
            return int(best) * per_node
        first, last = max(0, best - step), best + step


def work_per_worker(workers: int, per_node: int, spare_nodes: int, down: float, split: str) -> float:
    """Return the work of a worker, spares included, as a share of that of an active one that never waits: 0 to 1.

    Nodes fail and are repaired independently of each other, so the number of those down is binomially distributed.
    """
    total = -(-workers // per_node) + spare_nodes
    missing, chance = _missing(total, spare_nodes, down)
    there = np.maximum(workers - missing * per_node, 0)
    pace = there / workers if split == "even" else 1 / np.ceil(workers / np.maximum(there, 1)) * (there > 0)
    return float((pace * chance).sum()) * workers / (workers + spare_nodes * per_node)


def _missing(total: int, spare: int, down: float) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of nodes that no spare replaces, and the probability of each."""
    mean, sigma = total * down, math.sqrt(total * down * (1 - down))
    low, high = max(0, int(mean - _SIGMAS * (sigma + 1))), min(total, math.ceil(mean + _SIGMAS * (sigma + 1)))
    away = np.arange(low, high + 1)
    ratios = np.log((total - away[:-1]) / (away[:-1] + 1)) + math.log(down / (1 - down))
    logs = np.concatenate(([0.0], np.cumsum(ratios)))
    chance = np.exp(logs - logs.max())
    return np.maximum(away - spare, 0), chance / chance.sum()
