"""How newcomers and the other ranks meet: what their scripts' threads ask the communication thread to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from holdfast.base.side_work import say
from holdfast.engine import exits
from holdfast.errors import PeerFailed
from holdfast.recovery.regroup import RegroupLine

if TYPE_CHECKING:
    from holdfast.comm.seated import SeatedCommunicator
    from holdfast.distributed.joining import Joining
    from holdfast.distributed.recorder import GroupRecorder

_AGAIN_S = 1.0
_UNREGISTERED = "the script does not call holdfast.distributed.register(model=..., optimizer=..., position=...) before its first step"


class Engine(Protocol):
    """What a meeting needs of the communication thread."""

    world: SeatedCommunicator
    recorder: GroupRecorder

    def call(self, do: Callable[[], None], limit_s: float | None) -> None:
        """Run ``do`` in the communication thread; raise what it raises, or ``HoldfastError`` after ``limit_s``."""

    def recover(self, line: RegroupLine = RegroupLine.REVOKE) -> object:
        """In the communication thread: regroup from ``line`` on."""


class Meeting:
    """Seats newcomers at a boundary between steps, and ends those that are not needed.

    Args:
        engine: The communication thread.
        joining: The seat of this worker.
    """

    def __init__(self, engine: Engine, joining: Joining) -> None:
        self._engine = engine
        self._joining = joining
        self.over = threading.Event()
        """Set once a worker without a seat is not needed any more."""

    # -- the script's thread

    def wait_for_offer(self) -> int:
        """On a newcomer, return the seat that it will take, as soon as one is empty; end this process if the job ends."""
        self._joining.offered.wait()
        if self._joining.seat < 0:
            self.wait_for_end()
        return self._joining.seat

    def take_seat(self, timeout_s: float) -> None:
        """Receive the state and take the seat of a failed rank; end this process if the job ends before."""
        self._engine.call(self._take_seat, limit_s=timeout_s)
        if not self._joining.is_seated:
            rank = self._engine.world.base.local_ranks[0]
            say(f"rank {rank} ends: the others ended before it could take a seat")
            self.wait_for_end()

    def arrive(self, state: Callable[[], Any], timeout_s: float) -> None:
        """Pass the boundary before the next step; if newcomers wait there, give them ``state()`` and their seats."""

        def meet() -> None:
            self._joining.state = state()
            self._engine.call(self._meet, limit_s=timeout_s)
            self._joining.state = None

        self._joining.arrive(meet, timeout_s)

    def stay_outside(self, why: str = _UNREGISTERED) -> NoReturn:
        """On a newcomer that cannot take a seat: say why, wait for the end of the job, and end."""
        rank = self._engine.world.base.local_ranks[0]
        say(f"rank {rank} cannot take the seat of a failed rank, because {why}")
        self.wait_for_end()

    def wait_for_end(self) -> NoReturn:
        """On a worker without a seat: wait for the end of the job, and end this process."""
        self.over.wait()
        exits.leave_quietly()

    def _take_seat(self) -> None:
        """On a newcomer: make the others stop at a boundary, and receive the state there."""
        joining = self._joining
        if self.over.is_set():
            return
        joining.be_ready()
        self._engine.recover()
        self.end_if_outside()
        while not joining.seating.ends and (not joining.is_seated or joining.must_meet):
            if joining.takes_part:
                self._meet_once()
            else:  # those that could give the state are about to take seats themselves
                time.sleep(_AGAIN_S)
                self._engine.recover()
            self.end_if_outside()
        joining.pass_on()

    def _meet(self) -> None:
        """Let the newcomers that wait at this boundary take their seats."""
        while self._joining.must_meet:
            self._meet_once()

    def _meet_once(self) -> None:
        with contextlib.suppress(PeerFailed):  # in any case, the regrouping decides what has been received
            self._joining.transfer()
        self._engine.recover()

    def end_if_outside(self) -> None:
        """On a worker without a seat: let the others end if their scripts have ended; end if they have all failed."""
        if self._joining.is_seated:
            return
        if not self._joining.seating.holders:
            say("every rank that had the state of the training has failed")
            exits.kill_self()  # the launcher restarts the job
        if self._joining.seating.ends:
            while not self._engine.world.base.agree(True):
                self._engine.recover(RegroupLine.SHRINK)
            self._engine.recorder.finished()
            self.over.set()
