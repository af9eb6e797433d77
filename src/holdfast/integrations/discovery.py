"""Makes ``strategy="holdfast"`` known to Lightning and Fabric, once and wherever they are imported.

Lightning has no entry point for strategies. torch has one for backends, which it loads when it is imported; from there
:func:`install` waits for Lightning's modules with the registries. It imports neither Lightning nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

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


def install() -> None:
    """Register the strategies with the Lightning modules that are imported, now or later."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    attribute, make = _REGISTRIES[module.__name__]
    registry = getattr(module, attribute, None)  # another version of Lightning may have another name for it
    if registry is not None and NAME not in registry:
        registry.register(NAME, make, description="Fault-tolerant training, see holdfast.integrations.lightning")


class _Finder(MetaPathFinder):
    """Finds the modules with the registries as Python does, and registers the strategies once they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
