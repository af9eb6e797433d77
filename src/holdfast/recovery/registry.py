"""Strategies by name: those that come with Holdfast, and those of other packages.

Another package offers a strategy by an entry point::

    [project.entry-points."holdfast.strategies"]
    mine = "my_package.mine:Mine"

Mine is a subclass of :class:`~holdfast.recovery.strategy.Strategy` that is made with ``min_workers=``.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from holdfast.recovery.strategy import Strategy

GROUP = "holdfast.strategies"
"""Of entry points."""

BUILT_IN = {
    "rollback": "holdfast.recovery.rollback:Rollback",
    "forward": "holdfast.recovery.forward:Forward",
    "restart": "holdfast.recovery.restart:Restart",
    "reinit": "holdfast.recovery.reinit:Reinit",
    "partial": "holdfast.recovery.partial:Partial",
}
"""Name: module and class. The first one is the default."""


def _offered() -> EntryPoints:
    import importlib.metadata  # takes 20 ms, and most runs name a strategy of ours

    return importlib.metadata.entry_points(group=GROUP)


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies: ours first, then those of other packages."""
    others = _offered().names
    return (*BUILT_IN, *sorted(others - set(BUILT_IN)))


@functools.cache
def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy called ``name``, to read its traits or to make it.

    Raises:
        ConfigError: if there is no such strategy, or what another package offers under this name is none.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return _checked(name, getattr(importlib.import_module(module), attribute))
    found = [point for point in _offered() if point.name == name]
    if not found:
        raise ConfigError(f"strategy must be one of {', '.join(strategy_names())}, got {name!r}")
    return _checked(name, found[0].load())


def _checked(name: str, kind: Any) -> type[Strategy]:
    from holdfast.recovery.strategy import Strategy

    if isinstance(kind, type) and issubclass(kind, Strategy) and isinstance(getattr(kind, "exact", None), bool):
        return kind
    raise ConfigError(
        f"the entry point {name!r} of {GROUP} must name a subclass of holdfast.recovery.Strategy that says whether it is exact, got {kind!r}"
    )


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
