"""A newcomer brings its model up to date before it is admitted, while the members train.

It receives a stream of one member (:mod:`holdfast.state.streams`): the state before some step, and for each step since its
reduced gradients, with which it repeats the update as that member does. Once it has repeated all that were sent, it asks
to be admitted, and follows further steps until it is. Then its state is compared with that of the members, and what
differs is sent (:mod:`holdfast.state.difference`). So whether it was brought up to date, and how well, decides only how
long the members wait for it, never its bits.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import torch

from holdfast.checkpoint.format import flatten, unflatten
from holdfast.comm.memory import as_bytes
from holdfast.comm.waiting import waiting
from holdfast.engine.context import JobContext
from holdfast.errors import CheckpointError
from holdfast.membership.state_requests import StateRequest, StreamSecrets
from holdfast.models.optimizers import set_options
from holdfast.models.part import ModelPart
from holdfast.models.trainable import Trainable
from holdfast.records.types import CaughtUp
from holdfast.state.stream_wire import hang_up, has_more, receive_body, receive_header
from holdfast.state.transfer import room_for

_MOST_REQUESTS = 3
"""Requests after which the newcomer gives up: the members then send it the whole state, and wait for that."""
_CONNECT_S = 30.0
_LOOK_S = 0.05
"""Time between two looks at whether the member that sends is alive, seconds."""
_SETTLE_S = 60.0
"""Time for repeating the last steps while the members wait, seconds."""


def can_catch_up(job: JobContext, trainable: Trainable, *, pauses: bool) -> bool:
    """Return whether newcomers receive the state while training goes on; the same at all workers of a job.

    ``pauses``: the script runs the optimizer itself, so a newcomer cannot repeat what it does.
    """
    least = job.settings.catch_up_bytes
    has_requests = job.comm.state_requests is not None and trainable.whole is not None and not pauses
    return has_requests and 0 <= least <= trainable.size_bytes and trainable.device.type == "cpu"


def catch_up_first(job: JobContext, trainable: Trainable, *, pauses: bool) -> EarlyTransfer | None:
    """As a newcomer, follow the training before joining it; return None where that is not possible.

    Raises:
        StoreLost: if the membership store is lost.
    """
    if not can_catch_up(job, trainable, pauses=pauses):
        return None
    assert trainable.whole is not None
    catch_up = EarlyTransfer(job, trainable.whole)
    catch_up.run()
    return catch_up


def join_training(job: JobContext, catch_up: EarlyTransfer | None) -> bool:
    """Wait to be admitted, also without having caught up; return False if the training loop is over.

    Unless this worker is admitted, nothing uses its model any more afterwards.

    Raises:
        StoreLost: if the membership store is lost.
    """
    has_joined = False
    try:
        has_joined = job.comm.join(job.loop)
    finally:
        if not has_joined and catch_up is not None:
            catch_up.close()
    return has_joined


class EarlyTransfer:
    """Brings the model of this newcomer up to date.

    Args:
        job: The job context; this worker is no member yet.
        model: The replicated model with its optimizer.
    """

    def __init__(self, job: JobContext, model: ModelPart) -> None:
        assert job.comm.state_requests is not None
        self._job = job
        self._requests = job.comm.state_requests
        self._model = model
        self._follower: Follower | None = None
        self._request: StateRequest | None = None
        self._why = ""
        self._began_s = job.clock.now_s()

    def run(self) -> None:
        """Return once this newcomer has caught up, or no member can send the state any more, so that it joins without.

        Raises:
            StoreLost: if the membership store is lost.
        """
        try:
            self._ask_members()
        except BaseException:  # also one by which the script ends
            self.close()
            raise

    def close(self) -> None:
        """Follow the training no more: when this returns, no thread uses the model."""
        if self._follower is not None:
            self._follower.stop()

    def _ask_members(self) -> None:
        rank = self._job.comm.local_ranks[0]
        with waiting:
            for number in range(_MOST_REQUESTS):
                members = self._requests.living_members()
                if not members:
                    self._why = self._why or "no member of the job was alive"
                    break
                request = StateRequest(rank, members[(rank + number) % len(members)], self._job.loop, number)
                if self._has_caught_up(request):
                    break
        self._requests.withdraw()

    def _has_caught_up(self, request: StateRequest) -> bool:
        """Ask a member, and follow its stream; return whether this newcomer has caught up, False if the stream ended."""
        self._follower = None
        self._request = request
        address = self._requests.ask(request)
        if not address:
            self._why = f"worker {request.giver} could not send its state, or has ended"
            return False
        self._follower = follower = Follower(self._model, address)
        while not follower.is_current and follower.is_running:
            follower.wait(_LOOK_S)
            if not self._requests.can_give(request):
                follower.stop()
        self._why = follower.why
        return follower.is_current and not follower.why

    def settle(self, members: tuple[int, ...]) -> bool:
        """Return, once the member that sends has sent all, whether this newcomer has repeated every step.

        Raises:
            PeerFailed: if one of the ``members`` has failed meanwhile.
        """
        follower, ends_s = self._follower, time.monotonic() + _SETTLE_S
        if follower is None or self._request is None:
            return False
        while follower.is_running:
            follower.wait(_LOOK_S)
            self._job.comm.check_failures()
            if self._request.giver not in members or time.monotonic() > ends_s:
                follower.stop()
        self._why = follower.why
        return follower.is_complete

    def state(self) -> dict[str, Any]:
        """Return the state of the model, not copied."""
        return self._model.state_dict()

    def record(self, sent_bytes: int) -> CaughtUp:
        """Return the record of this; ``sent_bytes`` differed when the newcomer was admitted."""
        follower, request = self._follower, self._request
        return CaughtUp(
            rank=self._job.comm.local_ranks[0],
            giver=-1 if request is None else request.giver,
            first_step=-1 if follower is None else follower.first_step,
            steps=0 if follower is None else follower.steps,
            received_bytes=0 if follower is None else follower.received_bytes,
            sent_bytes=sent_bytes,
            seconds=self._job.clock.now_s() - self._began_s,
            why=self._why,
        )


class Follower:
    """Follows a stream in a thread: loads the state, and repeats each step.

    Args:
        model: The replicated model with its optimizer; nothing else uses it until :attr:`is_running` is False.
        address: Host, port and key of the stream.
    """

    def __init__(self, model: ModelPart, address: str) -> None:
        self._model = model
        self._host, self._port, key = address.split(" ")
        self._secrets = StreamSecrets(bytes.fromhex(key))
        self._socket: socket.socket | None = None
        self._is_stopped = False
        self._news = threading.Event()
        self._error: BaseException | None = None
        self._results = [torch.empty(layout.length, dtype=layout.dtype) for layout in model.buckets.layouts]
        self.first_step = -1
        self.steps = 0
        """Number of steps repeated."""
        self.received_bytes = 0
        self.is_current = False
        """Whether everything that had been sent was repeated at some time."""
        self.is_complete = False
        """Whether the stream has ended in order, and everything was repeated."""
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="holdfast-catch-up", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread still uses the model."""
        return self._thread.is_alive()

    @property
    def why(self) -> str:
        """Why the stream has ended before this newcomer was admitted; "" if it has not."""
        return "" if self._error is None else f"the stream ended: {self._error}"

    def wait(self, timeout_s: float) -> None:
        """Wait until this newcomer is current, or the stream has ended."""
        if self.is_current:
            self._thread.join(timeout_s)
        else:
            self._news.wait(timeout_s)

    def stop(self) -> None:
        """End the stream, and wait until the thread has ended."""
        self._is_stopped = True
        if self._socket is not None:
            hang_up(self._socket)
        self._thread.join()

    def _run(self) -> None:
        waiting.ignore_this_thread()
        torch.set_num_threads(self._num_threads)
        try:
            with torch.no_grad(), self._connected() as connection:
                self._load(connection)
                while self._repeat(connection):
                    pass
            self.is_complete = True
        except Exception as error:  # whatever the model or its optimizer raises, this newcomer can join without
            self._error = error
        finally:
            self._news.set()

    def _connected(self) -> socket.socket:
        connection = socket.create_connection((self._host, int(self._port)), _CONNECT_S)
        connection.settimeout(None)  # a step may take long; :meth:`stop` ends the wait
        self._socket = connection
        if self._is_stopped:
            hang_up(connection)
        connection.sendall(self._secrets.proof)
        return connection

    def _load(self, connection: socket.socket) -> None:
        header = receive_header(connection, self._secrets)
        tensors, packed = room_for(header["state"])
        receive_body(connection, packed.pieces)
        packed.unpack()
        self.received_bytes += sum(map(len, packed.pieces))
        self._model.load_state_dict(unflatten(tensors, header["state"]["skeleton"]), keeps=True)
        self.first_step = header["step"]
        self._note(connection)

    def _repeat(self, connection: socket.socket) -> bool:
        """Repeat the next step; return False if there is none, because this newcomer is being admitted."""
        header = receive_header(connection, self._secrets)
        if "end" in header:
            return False
        results = [as_bytes(result) for result in self._results]
        if header["sizes"] != [len(result) for result in results] or header["step"] != self.first_step + self.steps:
            raise CheckpointError(
                f"step {header['step']} does not continue the state before {self.first_step + self.steps}"
            )
        receive_body(connection, results)
        set_options(self._model.optimizer, header["options"])
        self._model.repeat_step(self._results, header["slices"], header["samples"])
        self.received_bytes += sum(header["sizes"])
        self.steps += 1
        self._note(connection)
        return True

    def _note(self, connection: socket.socket) -> None:
        """Read what follows each body, the number of messages that waited then; more may have come since."""
        if not receive_header(connection, self._secrets)["behind"] and not has_more(connection):
            self.is_current = True
            self._news.set()


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by path."""
    return {path: leaf for path, leaf in flatten(state)[0].items() if isinstance(leaf, torch.Tensor)}
