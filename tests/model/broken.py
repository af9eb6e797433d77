"""Protocols that leave one line out, to see what it is there for: the explorer finds what breaks without it."""

from __future__ import annotations

from holdfast.recovery import Protocol
from holdfast.recovery.messages import (
    Action,
    Agree,
    Agreed,
    CloseStep,
    Event,
    Leave,
    PeerLost,
    ProgressKnown,
    RanOut,
    Revoked,
    ShareProgress,
    Shrink,
    Shrunk,
    StepClosed,
)
from holdfast.recovery.protocol import State


class WithoutRevoke(Protocol):
    """Agrees at once, though others may still wait in a sum."""

    def _recover(self) -> list[Action]:
        super()._recover()
        return self._enter(State.HEARD, Agree(flag=False))


class WithoutHearing(Protocol):
    """Shrinks right after the revoke: nobody waits until all have heard."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.REVOKE and event == Revoked():
            return self._enter(State.SHRINK, Shrink())
        return super().handle(event)


class WithoutShrink(Protocol):
    """Goes on with the communicator that has the dead in it."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.HEARD and isinstance(event, Agreed):
            return self._enter(State.SHARE, ShareProgress(self.progress))
        return super().handle(event)


class WithoutFence(Protocol):
    """Uses the new communicator though others may still be making it."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.SHRINK and event == Shrunk():
            return self._enter(State.SHARE, ShareProgress(self.progress))
        return super().handle(event)


class WithoutConfirming(Protocol):
    """Decides as soon as it knows everybody's progress, though others may not."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is State.SHARE and isinstance(event, ProgressKnown):
            self._known = event
            return self._decide()
        return super().handle(event)


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
