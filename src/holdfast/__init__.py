"""PyTorch training that goes on, to the bit, while workers die.

Importing this module starts nothing and imports no torch: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.errors import ConfigError, HoldfastError, ScriptError
    from holdfast.settings import Settings
    from holdfast.train.reinit import reinit
    from holdfast.train.session import Session
    from holdfast.train.split.model import Pipeline, Sharded
    from holdfast.train.step import Step

__version__ = "0.1.0"

_WHERE = {
    "ConfigError": "holdfast.errors",
    "HoldfastError": "holdfast.errors",
    "Pipeline": "holdfast.train.split.model",
    "ScriptError": "holdfast.errors",
    "Session": "holdfast.train.session",
    "Settings": "holdfast.settings",
    "Sharded": "holdfast.train.split.model",
    "Step": "holdfast.train.step",
    "reinit": "holdfast.train.reinit",
}

__all__ = [
    "ConfigError",
    "HoldfastError",
    "Pipeline",
    "ScriptError",
    "Session",
    "Settings",
    "Sharded",
    "Step",
    "__version__",
    "reinit",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        msg = f"module 'holdfast' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
