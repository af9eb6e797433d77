"""Recovery decisions: the commit rule and the strategies. Pure: no torch, no clock, no disk, no network.

:class:`Protocol` is one worker's side of the commit and recovery protocol. A strategy decides once the progress of all
survivors is known. The same objects serve real workers, virtual workers and the model checker of the tests. Names are
imported on first use, because the command line only needs the names of strategies from this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

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
    "Forward": ".forward",
    "Partial": ".partial",
    "Protocol": ".protocol",
    "Reinit": ".reinit",
    "Restart": ".restart",
    "Rollback": ".rollback",
    "Strategy": ".strategy",
    "ProgressView": ".strategy",
    "make_strategy": ".registry",
    "strategy_class": ".registry",
    "strategy_names": ".registry",
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

__getattr__ = lazy(__name__, _WHERE)
