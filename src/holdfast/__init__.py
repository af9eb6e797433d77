"""Fault-tolerant PyTorch training: workers may die, and the result stays bit-identical.

Importing this module starts nothing and does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.config import Settings
    from holdfast.errors import ConfigError, HoldfastError, ScriptError
    from holdfast.session.media import Histogram, Image
    from holdfast.session.models import Pipeline, Sharded
    from holdfast.session.prepared import prepare
    from holdfast.session.reinit import reinit
    from holdfast.session.session import Session
    from holdfast.session.step import Step

__version__ = "0.1.0"

_WHERE = {
    "ConfigError": "holdfast.errors",
    "Histogram": "holdfast.session.media",
    "HoldfastError": "holdfast.errors",
    "Image": "holdfast.session.media",
    "Pipeline": "holdfast.session.models",
    "ScriptError": "holdfast.errors",
    "Session": "holdfast.session.session",
    "Settings": "holdfast.config",
    "Sharded": "holdfast.session.models",
    "Step": "holdfast.session.step",
    "prepare": "holdfast.session.prepared",
    "reinit": "holdfast.session.reinit",
}

__all__ = [
    "ConfigError",
    "Histogram",
    "HoldfastError",
    "Image",
    "Pipeline",
    "ScriptError",
    "Session",
    "Settings",
    "Sharded",
    "Step",
    "__version__",
    "prepare",
    "reinit",
]


__getattr__ = lazy(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted(__all__)
