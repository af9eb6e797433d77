"""The state transfer that admits newcomers: of the whole state, or of what differs where a newcomer has caught up."""

from __future__ import annotations

from typing import Any

from holdfast.data.plan import MiniBatch
from holdfast.engine.context import JobContext
from holdfast.models.trainable import Trainable
from holdfast.records.types import CaughtUp
from holdfast.state.catch_up import EarlyTransfer, can_catch_up, tensors_of
from holdfast.state.difference import receive_difference, send_difference
from holdfast.state.streams import StateStreams
from holdfast.state.transfer import receive_state, send_state


class Admission:
    """One worker's side: of a member, with the streams to newcomers that catch up, or of a newcomer.

    Args:
        job: The job context.
        trainable: The model that is trained.
        catch_up: On a newcomer, how it has caught up; None if it did not try.
        pauses: The script runs the optimizer itself.
    """

    def __init__(self, job: JobContext, trainable: Trainable, catch_up: EarlyTransfer | None, *, pauses: bool) -> None:
        self._job = job
        self._catch_up = catch_up
        self._streams: StateStreams | None = None
        self._sent_bytes = 0
        if can_catch_up(job, trainable, pauses=pauses):
            assert trainable.whole is not None
            self._streams = StateStreams(job, trainable.whole)

    # -- while the others train

    def before_step(self) -> None:
        """Begin the streams that newcomers ask for; the last step's results are about to be reused."""
        if self._streams is not None:
            self._streams.before_step()

    def before_update(self, batch: MiniBatch) -> None:
        """Send the gradients of a committed step to newcomers that catch up; the state is about to change."""
        if self._streams is not None:
            self._streams.before_update(batch)

    def hang_up(self) -> None:
        """End all streams: training ends, or continues from another state."""
        if self._streams is not None:
            self._streams.hang_up()

    # -- when newcomers are admitted

    def send(self, newcomers: tuple[int, ...], state: Any, info: dict[str, Any]) -> tuple[int, ...]:
        """Send the state, and return the newcomers that had caught up; see :meth:`receive`.

        Raises:
            PeerFailed: if the transfer did not complete here.
        """
        caught_up = self._caught_up(newcomers)
        if caught_up:
            send_difference(self._job.comm, newcomers, state, info)
        else:
            send_state(self._job.comm, newcomers, state, info)
        return caught_up

    def receive(self, newcomers: tuple[int, ...]) -> tuple[tuple[Any, dict[str, Any]], tuple[int, ...]]:
        """Receive the state with its info, and return both, with the newcomers that had caught up.

        Raises:
            PeerFailed: if the transfer did not complete here.
            CheckpointError: if the received bytes do not match their digests.
        """
        comm = self._job.comm
        caught_up = self._caught_up(newcomers)
        if not caught_up:
            return receive_state(comm, newcomers), caught_up
        has_state = self._catch_up is not None and comm.local_ranks[0] in caught_up
        tensors = tensors_of({"now": {"replica": self._catch_up.state()}}) if self._catch_up and has_state else {}
        state, info, self._sent_bytes = receive_difference(comm, newcomers, tensors)
        return (state, info), caught_up

    def _caught_up(self, newcomers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the newcomers that have repeated every step, the same at every worker; a collective."""
        if self._streams is None:
            return ()
        self._streams.end(newcomers)
        own_rank = self._job.comm.local_ranks[0]
        is_current = self._catch_up is not None and self._catch_up.settle(self._job.comm.members)
        flags = self._job.comm.maximum([int(rank == own_rank and is_current) for rank in newcomers])
        return tuple(rank for rank, has_caught_up in zip(newcomers, flags, strict=True) if has_caught_up)

    def take_record(self) -> CaughtUp | None:
        """Return, once, the record of how this newcomer caught up; None if it did not try, or is none."""
        catch_up, self._catch_up = self._catch_up, None
        return None if catch_up is None else catch_up.record(self._sent_bytes)
