"""Makes ``strategy="holdfast"`` known to Lightning and Fabric, once and wherever they are imported.

Lightning has no entry point for strategies. torch has one for backends, which it loads when it is imported; from there
:func:`install` waits for Lightning's modules with the registries. It imports neither Lightning nor torch.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from holdfast.base.on_import import when_imported
from holdfast.base.registered import named

NAME = "holdfast"
"""Name of the strategy."""
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "holdfast.integrations.lightning.strategy:HoldfastStrategy"),
    "lightning.fabric.strategies": (
        "STRATEGY_REGISTRY",
        "holdfast.integrations.lightning.fabric:HoldfastFabricStrategy",
    ),
}
"""Module: name of its registry, and module and class of the strategy."""


@functools.cache  # torch may ask more than once
def install() -> None:
    """Register the strategies with the Lightning modules that are imported, now or later."""
    when_imported(dict.fromkeys(_REGISTRIES, _register))


def _register(module: ModuleType) -> None:
    attribute, place = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)  # another version of Lightning may have another name for it
    if registry is not None and NAME not in registry:
        registry.register(
            NAME,
            functools.partial(_strategy, place),
            description="Fault-tolerant training, see holdfast.integrations.lightning",
        )


def _strategy(place: str, **settings: Any) -> Any:
    """Import a strategy only when a script uses it: Lightning is still being imported when it is registered."""
    return named(place)(**settings)
