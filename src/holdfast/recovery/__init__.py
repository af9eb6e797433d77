"""Deciding what to do: the commit rule and the strategies. Pure: no torch, no clock, no disk, no network.

:class:`Protocol` is one worker's side of the commit and recovery protocol; a strategy answers it when
everybody's progress is known. The same objects serve real workers, virtual ones and the explorer of the tests.
"""

from holdfast.recovery.forward import Forward
from holdfast.recovery.partial import Partial
from holdfast.recovery.protocol import Protocol
from holdfast.recovery.reinit import Reinit
from holdfast.recovery.restart import Restart
from holdfast.recovery.rollback import Rollback
from holdfast.recovery.strategy import Strategy, View, make_strategy

__all__ = ["Forward", "Partial", "Protocol", "Reinit", "Restart", "Rollback", "Strategy", "View", "make_strategy"]
