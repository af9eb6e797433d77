"""Fault-tolerant PyTorch training: workers may die, and the result stays bit-identical.

Importing this module starts nothing and does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.config import Settings
    from holdfast.errors import ConfigError, HoldfastError, ScriptError
    from holdfast.models.media import Histogram, Image
    from holdfast.models.specs import Pipeline, Sharded
    from holdfast.models.step import Step
    from holdfast.session.prepared import prepare
    from holdfast.session.reinit import reinit
    from holdfast.session.session import Session

__version__ = "0.1.0"

_WHERE = {
    "ConfigError": "holdfast.errors",
    "Histogram": "holdfast.models.media",
    "HoldfastError": "holdfast.errors",
    "Image": "holdfast.models.media",
    "Pipeline": "holdfast.models.specs",
    "ScriptError": "holdfast.errors",
    "Session": "holdfast.session.session",
    "Settings": "holdfast.config",
    "Sharded": "holdfast.models.specs",
    "Step": "holdfast.models.step",
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
