"""The offset between the wall clocks of two machines, by a request whose round trip is halved."""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from holdfast.side_work import run_aside

_TRIES = 4
_NONCE, _TIME = 8, struct.Struct("!d")


class ClockServer:
    """Answers with this machine's time, on a UDP port, until it is closed.

    Args:
        host: Address to listen at.
        clock: Source of the time, seconds since 1970.
    """

    def __init__(self, host: str, clock: Callable[[], float] = time.time) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._clock = clock
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="clock", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                asked, peer = self._socket.recvfrom(64)
                if len(asked) == _NONCE:  # an answer is as long as a request and a number, so that none is amplified
                    run_aside("answering the clock of another node", functools.partial(self._answer, asked, peer), None)

    def _answer(self, asked: bytes, peer: Any) -> None:
        self._socket.sendto(asked + _TIME.pack(self._clock()), peer)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure_offset(
    host: str, port: int, timeout_s: float, clock: Callable[[], float] = time.time
) -> tuple[float, float] | None:
    """Return by how much this machine's clock is ahead of a server's, and the uncertainty; None without an answer.

    The answer with the shortest round trip counts; the uncertainty is half of that.

    Args:
        host: Address of the :class:`ClockServer`.
        port: Its port.
        timeout_s: How long to try, seconds.
        clock: Source of the time on this side.
    """
    found: list[tuple[float, float]] = []
    ends_s = time.monotonic() + timeout_s
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        for _ in range(_TRIES):
            nonce = secrets.token_bytes(_NONCE)
            before, began_s = clock(), time.monotonic()
            asking.send(nonce)
            while (left_s := ends_s - time.monotonic()) > 0:
                asking.settimeout(left_s)
                said = asking.recv(64)
                if said[:_NONCE] == nonce and len(said) == _NONCE + _TIME.size:
                    half_s = (time.monotonic() - began_s) / 2
                    found.append((before + half_s - _TIME.unpack(said[_NONCE:])[0], half_s))
                    break
    return min(found, key=lambda one: one[1], default=None)
