"""What a row of the table is, and what was measured for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import ratio

FEWEST_VALUES = 5
"""With fewer values on a side, a bootstrap interval of a ratio of medians covers far less than 95 %, so none is given."""

Values = Sequence[float]
Content = Mapping[str, Any]
"""What a script wrote with ``--json``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A system that a row is compared with.

    Args:
        label: Its name in the table.
        environment: The environment that it runs in: a key of :data:`common.PYTHONS`.
        package: The distribution whose version is shown; "" if it has none.
        settings: Its settings, and which others were tried.
    """

    label: str
    environment: str = "own"
    package: str = "torch"
    settings: str = "defaults"


@dataclass(frozen=True, slots=True)
class Measured:
    """The values of a row.

    Args:
        ours: Values of Holdfast.
        peers: Values of each peer that ran, by its key in :attr:`Row.peers`.
        limit: Values of the limit, measured in the same run; empty if the row has none.
        paired: Value ``i`` of all of them was measured in the same block, so the bootstrap draws blocks.
    """

    ours: Values
    peers: Mapping[str, Values] = field(default_factory=dict)
    limit: Values = ()
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: what is measured, beside what, by which script.

    Args:
        name: What ``--only`` takes, with the group: ``step`` chooses ``step-mlp`` too.
        what: What is measured, as the table says it.
        unit: Unit of the values, written behind them.
        commands: Scripts of ``benchmarks/`` with their options; ``--json`` is added.
        read: Makes the values out of what the scripts wrote.
        peers: The peers, by the key that ``read`` uses.
        limit: What the limit is; "" if the row has none.
        limit_s: Deadline of the row in seconds, all commands together.
        tiny: The commands at a size that takes seconds and counts for nothing.
        long: The commands of ``--long``; the same as ``commands`` if empty.
        more_is_better: A larger value is better, so that the ratio is that of the peer to Holdfast.
        only_long: Measured with ``--long``, or if it is named.
        why: For each peer whose interval is not below 1: the reason, once it was looked into.
    """

    name: str
    what: str
    unit: str
    commands: tuple[tuple[str, ...], ...]
    read: Callable[[Sequence[Content]], Measured]
    peers: Mapping[str, Peer]
    tiny: tuple[tuple[str, ...], ...]
    limit: str = ""
    limit_s: float = 180.0
    long: tuple[tuple[str, ...], ...] = ()
    more_is_better: bool = False
    only_long: bool = False
    why: Mapping[str, str] = field(default_factory=dict)

    def commands_of(self, size: str) -> tuple[tuple[str, ...], ...]:
        """Return the commands of a size: ``tiny``, ``usual`` or ``long``."""
        return {"tiny": self.tiny, "usual": self.commands, "long": self.long or self.commands}[size]


@dataclass(frozen=True, slots=True)
class Against:
    """Holdfast beside one peer.

    Args:
        peer: Key of the peer.
        median: Its median.
        ratio: Below 1 where Holdfast is better.
        low: Lower end of the 95 % interval of the ratio, None if there are too few values.
        high: Upper end.
        values: The number of values that the interval is made of: the smaller side's.
    """

    peer: str
    median: float
    ratio: float
    low: float | None
    high: float | None
    values: int

    @property
    def is_below(self) -> bool:
        """Whether the upper end of the interval is below 1."""
        return self.high is not None and self.high < 1.0


def compare(row: Row, measured: Measured) -> list[Against]:
    """Return Holdfast beside each peer, the best peer first."""
    found = [_against(row, measured, peer, values) for peer, values in measured.peers.items() if values]
    return sorted(found, key=lambda one: one.median, reverse=row.more_is_better)


def _against(row: Row, measured: Measured, peer: str, values: Values) -> Against:
    a, b = (values, measured.ours) if row.more_is_better else (measured.ours, values)
    number = min(len(a), len(b))
    median = statistics.median(values)
    quotient = statistics.median(a) / statistics.median(b)
    if number < FEWEST_VALUES:
        return Against(peer, median, quotient, None, None, number)
    found = ratio(a, b, paired=measured.paired and len(a) == len(b))
    return Against(peer, median, quotient, found["low"], found["high"], number)


def share_of_limit(row: Row, measured: Measured) -> float | None:
    """Return how near Holdfast is to the limit: 1 is at the limit; None if the row has no limit."""
    if not measured.limit:
        return None
    ours, limit = statistics.median(measured.ours), statistics.median(measured.limit)
    return ours / limit if row.more_is_better else limit / ours
