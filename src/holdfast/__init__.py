"""Fault-tolerant PyTorch training: workers may die, and the result stays bit-identical.

Importing this module starts nothing and does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast import _moved

if TYPE_CHECKING:
    from holdfast.config import Settings
    from holdfast.errors import ConfigError, HoldfastError, ScriptError
    from holdfast.session.models import Pipeline, Sharded
    from holdfast.session.reinit import reinit
    from holdfast.session.session import Session
    from holdfast.session.step import Step

__version__ = "0.1.0"

_WHERE = {
    "ConfigError": "holdfast.errors",
    "HoldfastError": "holdfast.errors",
    "Pipeline": "holdfast.session.models",
    "ScriptError": "holdfast.errors",
    "Session": "holdfast.session.session",
    "Settings": "holdfast.config",
    "Sharded": "holdfast.session.models",
    "Step": "holdfast.session.step",
    "reinit": "holdfast.session.reinit",
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


_moved.install()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
