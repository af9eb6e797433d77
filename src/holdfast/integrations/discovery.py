"""Makes ``strategy="holdfast"`` known to Lightning and Fabric, once and wherever they are imported.

Lightning has no entry point for strategies. torch has one for backends, which it loads when it is imported; from there
:func:`install` waits for Lightning's modules with the registries. It imports neither Lightning nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.base.on_import import when_imported

NAME = "holdfast"
"""Name of the strategy."""


def _trainer_strategy(**settings: Any) -> Any:
    from holdfast.integrations.lightning.strategy import HoldfastStrategy

    return HoldfastStrategy(**settings)


def _fabric_strategy(**settings: Any) -> Any:
    from holdfast.integrations.lightning.fabric import HoldfastFabricStrategy

    return HoldfastFabricStrategy(**settings)


_REGISTRIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", _trainer_strategy),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", _fabric_strategy),
}
"""Module: name of its registry, and what makes the strategy."""


@functools.cache  # torch may ask more than once
def install() -> None:
    """Register the strategies with the Lightning modules that are imported, now or later."""
    when_imported(dict.fromkeys(_REGISTRIES, _register))


def _register(module: ModuleType) -> None:
    attribute, make = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)  # another version of Lightning may have another name for it
    if registry is not None and NAME not in registry:
        registry.register(NAME, make, description="Fault-tolerant training, see holdfast.integrations.lightning")
