"""Carries out regrouping after a failure: the only calls of ``revoke``, ``agree``, ``shrink`` and of sharing progress.

The sequence is defined in :mod:`holdfast.recovery.regroup`. The ``torch.distributed`` backend goes through it in one call.
A training session carries one action out at a time, because the protocol treats each as an event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.comm import Communicator
from holdfast.errors import InternalError, PeerFailed
from holdfast.recovery.messages import (
    Action,
    Agree,
    Agreed,
    Event,
    LeftGroup,
    PeerLost,
    Progress,
    Revoke,
    Revoked,
    ShareProgress,
    Shrink,
    Shrunk,
)
from holdfast.recovery.regroup import RegroupLine, line_after, order_of


class Regrouping(ABC):
    """A driver of the sequence: it adds what it does besides, and what its progress is."""

    @property
    @abstractmethod
    def _comm(self) -> Communicator:
        """The communicator; after a regrouping its members are the survivors."""

    def _agree(self, flag: bool) -> bool:
        return self._comm.agree(flag)

    @abstractmethod
    def _shrink(self) -> bool:
        """Start a new generation; return whether this worker is a member of it."""

    @abstractmethod
    def _share(self, progress: Progress) -> Event:
        """Exchange progress with all survivors; raise PeerFailed if that did not complete here."""

    def _carry_out_line(self, order: Action) -> Event:
        """Carry out one line of the sequence.

        Raises:
            PeerFailed: if progress could not be shared.
            StoreLost: if the membership store is lost, so that no agreement is possible.
        """
        match order:
            case Revoke():
                self._comm.revoke()
                return Revoked()
            case Agree(fences=True) if self._comm.has_atomic_shrink:
                return Agreed(True)
            case Agree(flag=flag):
                return Agreed(self._agree(flag))
            case Shrink():
                return Shrunk() if self._shrink() else LeftGroup()
            case ShareProgress(progress=progress):
                return self._share(progress)
            case _:
                raise InternalError(f"unknown action {order}")

    def _regroup(self, line: RegroupLine | None, progress: Progress) -> None:
        """Regroup the survivors, through all further failures, from the first line that some peer may not have passed yet."""
        while line is not None:
            try:
                event = self._carry_out_line(order_of(line, progress))
            except PeerFailed:
                event = PeerLost()
            line = line_after(line, succeeded=event not in (PeerLost(), Agreed(value=False)))
