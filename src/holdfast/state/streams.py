"""Streams of state from a member of the job to newcomers, while training goes on.

A newcomer asks one member (:mod:`holdfast.membership.state_requests`). Before its next step that member begins a stream: the
state before the step, then for each step that it commits the reduced gradients, with which the newcomer repeats the update
(:mod:`holdfast.state.catch_up`). A thread sends both from where they lie. The state stays as it is until the optimizer
runs, and the gradients until the next step begins: what was not sent by then is copied.

A stream promises nothing: what a newcomer has is compared when it is admitted. So no other member knows of it, and it may
end at any time.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from holdfast.comm.memory import as_bytes
from holdfast.data.plan import MiniBatch
from holdfast.engine.context import JobContext
from holdfast.membership.state_requests import StateRequest, StreamSecrets
from holdfast.models.optimizers import options_of
from holdfast.models.part import ModelPart
from holdfast.state.live_bytes import LiveBytes
from holdfast.state.stream_wire import hang_up, send_message
from holdfast.state.transfer import pack_state

_CONNECT_S = 30.0
"""Time within which a newcomer must open the stream that it asked for, and take each megabyte of it."""
_PROVE_S = 5.0
"""Time within which a connection must begin with the proof; the newcomer sends it at once."""
_END_S = 5.0
_MOST_WAITING = 4.0
"""A newcomer for which more than this many times the state waits is too slow to catch up."""


class StateStreams:
    """The streams that this worker sends.

    Args:
        job: The job context.
        model: The replicated model with its optimizer.
    """

    def __init__(self, job: JobContext, model: ModelPart) -> None:
        self._job = job
        self._model = model
        self._streams: dict[int, StateStream] = {}

    def before_step(self) -> None:
        """Begin the streams that were asked for since the last step. The results of that step are about to be reused."""
        requests = self._job.comm.state_requests
        assert requests is not None
        dead = requests.dead() if self._streams else set()
        for newcomer, stream in list(self._streams.items()):
            if newcomer in dead:
                stream.hang_up()  # its thread may still wait for the newcomer to connect
            stream.settle()
            if stream.is_over:
                del self._streams[newcomer]
        for request in requests.take_new(self._job.loop):
            self._begin(request)

    def _begin(self, request: StateRequest) -> None:
        job, requests = self._job, self._job.comm.state_requests
        assert requests is not None
        if (earlier := self._streams.pop(request.newcomer, None)) is not None:
            earlier.hang_up()
        header, packed = pack_state(self._model.state_dict())
        state = LiveBytes(packed.share(0, 1))
        if job.settings.overlap_optimizer:
            state.settle()  # buckets are updated before the step is committed
        try:
            stream = StateStream(requests.own_address, requests.key_for, round(_MOST_WAITING * state.size_bytes))
        except (OSError, RuntimeError):  # no port, file or thread is left: another member may send
            requests.answer(request, "")
            return
        stream.send({"step": job.step, "state": header}, state)
        self._streams[request.newcomer] = stream
        requests.answer(request, stream.address)

    def before_update(self, batch: MiniBatch) -> None:
        """Send the gradients of a committed step. The state is about to change."""
        if not self._streams:
            return
        gradients = self._model.gradients
        results = [as_bytes(result) for result in gradients.sums]
        header = {
            "step": batch.step,
            "slices": gradients.summed_slices,
            "samples": batch.samples_of(gradients.summed_slices[-1]),
            "options": options_of(self._model.optimizer),
            "sizes": [len(result) for result in results],
        }
        for stream in self._streams.values():
            stream.settle()
            stream.send(header, LiveBytes(results))

    def end(self, newcomers: tuple[int, ...]) -> None:
        """End the streams to newcomers that are being admitted, once everything is sent."""
        for newcomer in newcomers:
            if (stream := self._streams.pop(newcomer, None)) is not None:
                stream.end()

    def hang_up(self) -> None:
        """End all streams: training ends, or continues from another state."""
        for stream in self._streams.values():
            stream.hang_up()
            stream.join()
        self._streams.clear()


class StateStream:
    """A stream to one newcomer: a thread sends what :meth:`send` hands it.

    Args:
        host: Address at which the newcomer reaches this worker.
        key_for: Returns the key of a stream, for its name.
        most_bytes: The stream ends when more than this waits to be sent.
    """

    def __init__(self, host: str, key_for: Callable[[str], bytes], most_bytes: int) -> None:
        self.is_over = False
        self._most_bytes = most_bytes
        self._handed_bytes = self._sent_bytes = 0  # each written by one thread only
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], LiveBytes] | None] = queue.SimpleQueue()
        self._newest: LiveBytes | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        name = secrets.token_hex(16)
        self._secrets = StreamSecrets(key_for(name))
        self.address = f"{host} {self._socket.getsockname()[1]} {name}"
        """What the newcomer needs to connect, besides the token: host, port and the name of the stream, which is no secret."""
        self._thread = threading.Thread(target=self._run, name="holdfast-state", daemon=True)
        self._thread.start()

    def send(self, header: dict[str, Any], body: LiveBytes) -> None:
        """Send a message after all others; its bytes must not change before :meth:`settle`, which comes before the next one."""
        self._handed_bytes += body.size_bytes
        if self._handed_bytes - self._sent_bytes > self._most_bytes:
            self.hang_up()
        if not self.is_over:
            self._newest = body
            self._messages.put((header, body))

    def settle(self) -> None:
        """Copy what was not sent yet: from now on the original memory may change."""
        if self._newest is not None and not self.is_over:
            self._newest.settle()
        self._newest = None

    def end(self) -> None:
        """End the stream once everything is sent."""
        self.send({"end": True}, LiveBytes(()))
        self._messages.put(None)

    def hang_up(self) -> None:
        """End the stream at once."""
        self.is_over = True
        self._messages.put(None)
        hang_up(self._socket)

    def join(self) -> None:
        """Wait, after :meth:`hang_up`, until nothing reads the memory any more."""
        self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with (
                contextlib.suppress(OSError),
                self._accepted() as connection,
            ):  # a newcomer that ends tells its launcher
                while (message := self._messages.get()) is not None and not self.is_over:
                    header, body = message
                    send_message(connection, header, body, self._secrets)
                    self._sent_bytes += body.size_bytes
                    behind = {"behind": self._messages.qsize()}  # since the body began
                    send_message(connection, behind, LiveBytes(()), self._secrets)
        finally:
            self.is_over = True

    def _accepted(self) -> socket.socket:
        """Return the connection of the newcomer."""
        with self._socket as listener:
            listener.settimeout(_CONNECT_S)
            connection, _ = listener.accept()
            while not self._knows_token(connection):
                connection.close()
                connection, _ = listener.accept()
        connection.settimeout(_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the newcomer waits for what follows a body
        self._socket = connection
        if self.is_over:
            hang_up(connection)
        return connection

    def _knows_token(self, connection: socket.socket) -> bool:
        connection.settimeout(_PROVE_S)
        try:
            proof = connection.recv(len(self._secrets.proof), socket.MSG_WAITALL)
        except OSError:
            return False
        return hmac.compare_digest(proof, self._secrets.proof)
