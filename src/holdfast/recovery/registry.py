"""Strategies by name: those that come with Holdfast, and those of other packages.

Another package offers a strategy by an entry point::

    [project.entry-points."holdfast.strategies"]
    mine = "my_package.mine:Mine"

Mine is a subclass of :class:`~holdfast.recovery.strategy.Strategy` that is made with ``min_workers=``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.registered import Registered

if TYPE_CHECKING:
    from holdfast.recovery.strategy import Strategy

BUILT_IN = {
    "rollback": "holdfast.recovery.rollback:Rollback",
    "forward": "holdfast.recovery.forward:Forward",
    "restart": "holdfast.recovery.restart:Restart",
    "reinit": "holdfast.recovery.reinit:Reinit",
    "partial": "holdfast.recovery.partial:Partial",
}
"""Name: module and class. The first one is the default."""
_STRATEGIES = Registered("strategy", "holdfast.strategies", BUILT_IN)

strategy_names = _STRATEGIES.names


@functools.cache
def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy called ``name``, to read its traits or to make it.

    Raises:
        ConfigError: if there is no such strategy, or what another package offers under this name is none.
    """
    from holdfast.recovery.strategy import Strategy

    kind: type[Strategy] = _STRATEGIES.load(name, Strategy)
    if not isinstance(getattr(kind, "exact", None), bool):
        raise ConfigError(f"the strategy {name!r}, {kind!r}, must say whether it is exact")
    return kind


def make_strategy(name: str, *, min_workers: int = 1) -> Strategy:
    """Return the strategy called ``name``.

    Args:
        name: One of :func:`strategy_names`.
        min_workers: With fewer survivors it orders to save and stop, ``>= 1``.

    Raises:
        ConfigError: if there is no such strategy.
    """
    make: Any = strategy_class(name)
    strategy: Strategy = make(min_workers=min_workers)
    return strategy
