"""The machines."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import check_choice, check_range

LEVELS = ("worker", "node", "rack")
"""What may fail; all workers in it are down with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers in nodes in racks, numbered through.

    Args:
        workers: That compute, ``>= 1``.
        spares: That take part in every sum with nothing of their own until a place is free, ``>= 0``. They fail like
            the others, and all notice.
        workers_per_node: ``>= 1``.
        nodes_per_rack: ``>= 1``.

    Raises:
        ConfigError: if a number is out of range.
    """

    workers: int
    spares: int = 0
    workers_per_node: int = 1
    nodes_per_rack: int = 16

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("spares", 0), ("workers_per_node", 1), ("nodes_per_rack", 1)):
            value = getattr(self, name)
            if type(value) is not int:
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
            check_range(name, value, least, most=10_000_000)

    @property
    def total(self) -> int:
        """Workers and spares."""
        return self.workers + self.spares

    def width(self, level: str) -> int:
        """Return how many workers one worker, node or rack has."""
        check_choice("level", level, LEVELS)
        widths = {"worker": 1, "node": self.workers_per_node, "rack": self.workers_per_node * self.nodes_per_rack}
        return widths[level]

    def units(self, level: str) -> int:
        """Return how many there are; the last may not be full."""
        return -(-self.total // self.width(level))
