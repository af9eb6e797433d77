"""The machines."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import check_choice, check_range

LEVELS = ("worker", "node", "rack")
"""Units that may fail; a unit takes all its workers down with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers in nodes in racks, numbered consecutively.

    Args:
        workers: Active workers, ``>= 1``.
        spares: Hot spares, ``>= 0``. They take part in every all-reduce without slices of their own until a worker must
            be replaced. They fail like active workers, and all members notice.
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
        """Workers and spares together."""
        return self.workers + self.spares

    def width(self, level: str) -> int:
        """Return the number of workers of one worker, node or rack."""
        check_choice("level", level, LEVELS)
        widths = {"worker": 1, "node": self.workers_per_node, "rack": self.workers_per_node * self.nodes_per_rack}
        return widths[level]

    def units(self, level: str) -> int:
        """Return the number of units of a level; the last one may be incomplete."""
        return -(-self.total // self.width(level))
