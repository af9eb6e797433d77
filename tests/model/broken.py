"""Protocols that leave one line out, to see what it is there for: the explorer finds what breaks without it."""

from __future__ import annotations

from holdfast.recovery import Protocol
from holdfast.recovery.messages import Action, CloseStep, Event, Leave, PeerLost, RanOut, StepClosed
from holdfast.recovery.protocol import State
from holdfast.recovery.regroup import Line


class WithoutRevoke(Protocol):
    """Agrees at once, though others may still wait in a sum."""

    def _regroup(self, line: Line) -> list[Action]:
        return super()._regroup(Line.HEARD if line is Line.REVOKE else line)


class WithoutHearing(Protocol):
    """Shrinks right after the revoke: nobody waits until all have heard."""

    def _regroup(self, line: Line) -> list[Action]:
        return super()._regroup(Line.SHRINK if self.state is Line.REVOKE else line)


class WithoutShrink(Protocol):
    """Goes on with the communicator that has the dead in it."""

    def _regroup(self, line: Line) -> list[Action]:
        return super()._regroup(Line.SHARE if self.state is Line.HEARD else line)


class WithoutFence(Protocol):
    """Uses the new communicator though others may still be making it."""

    def _regroup(self, line: Line) -> list[Action]:
        return super()._regroup(Line.SHARE if self.state is Line.SHRINK else line)


class WithoutConfirming(Protocol):
    """Decides as soon as it knows everybody's progress, though others may not."""

    def _regroup(self, line: Line) -> list[Action]:
        return self._decide() if line is Line.CONFIRM else super()._regroup(line)


class WithoutGate(Protocol):
    """Leaves after its last step."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.COMPUTE and event == RanOut():
            return self._enter(State.LEFT, Leave())
        return super().handle(event)


class BarrierForGate(Protocol):
    """Leaves after a barrier instead of an agreement."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.COMPUTE and event == RanOut():
            return self._enter(State.GATE, CloseStep(self.step))
        if self.state is State.GATE and event == StepClosed():
            return self._enter(State.LEFT, Leave())
        if self.state is State.GATE and event == PeerLost():
            self._state = State.CLOSE
        return super().handle(event)
