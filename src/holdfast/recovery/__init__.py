"""Recovery decisions: the commit rule and the strategies. Pure: no torch, no clock, no disk, no network.

:class:`Protocol` is one worker's side of the commit and recovery protocol. A strategy decides once the progress of all
survivors is known. The same objects serve real workers, virtual workers and the model checker of the tests. Names are
imported on first use, because the command line only needs the names of strategies from this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._moved import renamed

if TYPE_CHECKING:
    from holdfast.recovery.forward import Forward
    from holdfast.recovery.partial import Partial
    from holdfast.recovery.protocol import Protocol
    from holdfast.recovery.registry import make_strategy, strategy_class, strategy_names
    from holdfast.recovery.reinit import Reinit
    from holdfast.recovery.restart import Restart
    from holdfast.recovery.rollback import Rollback
    from holdfast.recovery.strategy import ProgressView, Strategy

_WHERE = {
    "Forward": "forward",
    "Partial": "partial",
    "Protocol": "protocol",
    "Reinit": "reinit",
    "Restart": "restart",
    "Rollback": "rollback",
    "Strategy": "strategy",
    "ProgressView": "strategy",
    "make_strategy": "registry",
    "strategy_class": "registry",
    "strategy_names": "registry",
}

__all__ = [
    "Forward",
    "Partial",
    "ProgressView",
    "Protocol",
    "Reinit",
    "Restart",
    "Rollback",
    "Strategy",
    "make_strategy",
    "strategy_class",
    "strategy_names",
]


def __getattr__(name: str) -> Any:
    name = renamed(__name__, name)
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.recovery' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"holdfast.recovery.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
