"""Protocols that leave one line out, to see what it is there for: the explorer finds what breaks without it."""

from __future__ import annotations

from holdfast.recovery import Protocol
from holdfast.recovery.messages import (
    Action,
    DataExhausted,
    Event,
    Leave,
    PeerLost,
    Publish,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.protocol import ProtocolState
from holdfast.recovery.regroup import RegroupLine


class WithoutRevoke(Protocol):
    """Agrees at once, though others may still wait in a sum."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return super()._regroup(RegroupLine.HEARD if line is RegroupLine.REVOKE else line)


class WithoutHearing(Protocol):
    """Shrinks right after the revoke: nobody waits until all have heard."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return super()._regroup(RegroupLine.SHRINK if self.state is RegroupLine.REVOKE else line)


class WithoutShrink(Protocol):
    """Goes on with the communicator that has the dead in it; the study of parallelism explores it."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return super()._regroup(RegroupLine.SHARE if self.state is RegroupLine.HEARD else line)


class WithoutFence(Protocol):
    """Uses the new communicator though others may still be making it."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return super()._regroup(RegroupLine.SHARE if self.state is RegroupLine.SHRINK else line)


class WithoutConfirming(Protocol):
    """Decides as soon as it knows everybody's progress, though others may not."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return self._decide() if line is RegroupLine.CONFIRM else super()._regroup(line)


class WithoutGate(Protocol):
    """Leaves after its last step."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is ProtocolState.COMPUTE and event == DataExhausted():
            return self._enter(ProtocolState.LEFT, Leave())
        return super().handle(event)


class BarrierForGate(Protocol):
    """Leaves after a barrier instead of an agreement."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        if self.state is ProtocolState.COMPUTE and event == DataExhausted():
            return self._enter(ProtocolState.GATE, VoteStep(self.step))
        if self.state is ProtocolState.GATE and event == StepVoted():
            return self._enter(ProtocolState.LEFT, Leave())
        if self.state is ProtocolState.GATE and event == PeerLost():
            self._state = ProtocolState.CLOSE
        return super().handle(event)


class PublishesAtOnce(Protocol):
    """Publishes a step when it has applied it."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Protocol.handle`."""
        applied = event == StepApplied()
        orders = super().handle(event)
        return [Publish(self.step - 1), *orders] if applied else orders
