"""What membership asks of a store, and the local copy that every client keeps of it.

A store holds short strings under keys. What makes it fit for decisions is :meth:`Store.create`: of all who try to be the
first to write a key one succeeds, and everybody reads what that one wrote. Everybody is told of every change, so that
reading, and waiting for something, cost no message.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import ConfigError, StoreLost

_Found = TypeVar("_Found")

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20

LEASE_S = 10.0
"""A client that has not been heard of for so long loses what it leased. All other times follow from it."""


def beat_s(lease_s: float) -> float:
    """Return how often a client shows that it is alive."""
    return lease_s / 5


def patience_s(lease_s: float) -> float:
    """Return after how long without an answer a client takes the store for lost: it knows before its lease is over."""
    return 0.7 * lease_s


class Store(ABC):
    """Keys and values that all workers and launchers of a job share, and the local copy of them.

    What writes raises :class:`~holdfast.errors.StoreLost` if the store does not answer.
    """

    def __init__(self) -> None:
        _stores.add(self)
        self._items: dict[str, str] = {}
        self._changed = threading.Condition()
        self._version = 0
        self._lost = ""

    @property
    def version(self) -> int:
        """Grows whenever the local copy changes, or the store is lost."""
        return self._version

    @property
    def lost(self) -> str:
        """Why the store cannot be reached any more, "" as long as it can."""
        return self._lost

    @property
    @abstractmethod
    def own_address(self) -> str:
        """The address of this machine on the way to the store: others reach us there, too."""

    @abstractmethod
    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """Write a value.

        Args:
            key: Which; at most :data:`MAX_KEY_BYTES`.
            value: At most :data:`MAX_VALUE_BYTES`.
            leased: It goes when this client has not been heard of for the time of a lease.
        """

    @abstractmethod
    def create(self, key: str, value: str) -> bool:
        """Write a value unless there is one; return whether there was none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key; one that ends in ``/`` stands for all that begin with it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; what was leased runs out."""

    def get(self, key: str) -> str | None:
        """Return the value as far as it is known here, without asking."""
        return self._items.get(key)

    def under(self, prefix: str) -> dict[str, str]:
        """Return what is known here of the keys that begin with ``prefix``, by the rest of the key."""
        with self._changed:
            return {key[len(prefix) :]: value for key, value in self._items.items() if key.startswith(prefix)}

    def wait(self, ready: Callable[[], _Found | None], timeout_s: float | None = None) -> _Found | None:
        """Return what ``ready`` returns as soon as it is not None; it is asked again after every change.

        Args:
            ready: Looks at the local copy; must not call the store otherwise.
            timeout_s: Then None is returned; None waits as long as the store is there.

        Raises:
            StoreLost: if the store is lost and ``ready`` has nothing.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (found := ready()) is None:
                if self._lost:
                    raise StoreLost(self._lost)
                left_s = None if ends_s is None else ends_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return found

    def _note(self, key: str, value: str | None) -> None:
        """Take in a change; None means that the key is gone."""
        with self._changed:
            if value is None:
                self._items.pop(key, None)
            else:
                self._items[key] = value
            self._version += 1
            self._changed.notify_all()

    def _note_lost(self, why: str) -> None:
        with self._changed:
            self._lost = self._lost or why
            self._version += 1
            self._changed.notify_all()

    def _sockets(self) -> list[socket.socket]:
        """Return what is open."""
        return []

    def _forget(self) -> None:
        """After a fork, in the child: the connections are the parent's, and a lock may be held by a thread that is not here."""
        self._changed = threading.Condition()
        self._lost = "the connection to the store belongs to the process that was forked from"
        for each in self._sockets():
            if (number := each.detach()) >= 0:
                os.close(number)


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._forget()


os.register_at_fork(after_in_child=_after_fork)


class Silence:
    """How long nothing has been heard, as far as this process was awake to hear it: ``limit_s`` is too long.

    One looks at it every ``look_s`` at least, or was held up.
    """

    def __init__(self, limit_s: float, look_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._look_s = look_s
        self._clock = clock
        self._since_s = self._looked_s = clock()

    def broken(self, at_s: float) -> None:
        """Note that there was a sign of life which shows that it was there at ``at_s``."""
        self._since_s = max(self._since_s, at_s)

    def is_too_long(self) -> bool:
        """Return whether it lasts too long; the time in which it was not looked at, as when the process was stopped, does not count."""
        now_s = self._clock()
        held_up_s = max(0.0, now_s - self._looked_s - 2 * self._look_s)
        self._since_s = min(self._since_s + held_up_s, now_s)
        self._looked_s = now_s
        return now_s - self._since_s > self.limit_s


def check_size(key: str, value: str) -> None:
    """Make sure that a store takes this, or raise ``ConfigError``."""
    try:
        sizes = len(key.encode()), len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key!r:.80} or its value is no text that can be stored: {error.reason}") from error
    if sizes[0] > MAX_KEY_BYTES or sizes[1] > MAX_VALUE_BYTES:
        raise ConfigError(
            f"{key!r:.80} with {len(value)} characters is too large for the store; keys may have {MAX_KEY_BYTES} bytes, values {MAX_VALUE_BYTES}"
        )
