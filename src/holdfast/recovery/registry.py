"""Registry of strategies: the built-in ones, and those that other packages provide.

Another package provides a strategy through an entry point::

    [project.entry-points."holdfast.strategies"]
    mine = "my_package.mine:Mine"

``Mine`` is a subclass of :class:`~holdfast.recovery.strategy.Strategy` whose constructor takes ``min_workers=``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from holdfast.base.registered import Registry
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.recovery.strategy import Strategy

BUILT_IN = {
    "rollback": "holdfast.recovery.rollback:Rollback",
    "forward": "holdfast.recovery.forward:Forward",
    "restart": "holdfast.recovery.restart:Restart",
    "reinit": "holdfast.recovery.reinit:Reinit",
    "partial": "holdfast.recovery.partial:Partial",
}
"""Name: module and class. The first entry is the default."""
_STRATEGIES = Registry("strategy", "holdfast.strategies", BUILT_IN)

strategy_names = _STRATEGIES.names


@functools.cache
def strategy_class(name: str) -> type[Strategy]:
    """Return the class of the strategy called ``name``, to read its traits or to instantiate it.

    Raises:
        ConfigError: if there is no such strategy, or another package provides something else under this name.
    """
    from holdfast.recovery.strategy import Strategy

    kind: type[Strategy] = _STRATEGIES.load(name, Strategy)
    if not isinstance(getattr(kind, "exact", None), bool):
        raise ConfigError(f"strategy {name!r} ({kind!r}) must set its class attribute exact to True or False")
    return kind


def make_strategy(name: str, *, min_workers: int = 1) -> Strategy:
    """Return the strategy called ``name``.

    Args:
        name: One of :func:`strategy_names`.
        min_workers: With fewer survivors the strategy saves and stops, ``>= 1``.

    Raises:
        ConfigError: if there is no such strategy.
    """
    make: Any = strategy_class(name)
    strategy: Strategy = make(min_workers=min_workers)
    return strategy
