"""Interface of a membership store, and the local copy that every client keeps.

A store maps keys to short strings. :meth:`Store.create` makes it suitable for agreement: of all clients that try to
create a key, exactly one succeeds, and all read its value. All clients are notified of every change, so reads are local.
The store also decides: it counts the votes that members cast (:mod:`~holdfast.membership.acts`), creates each decision
once, not again after the keys of its act were removed, and shows its clients decisions, not votes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership.keyed_hash import keyed_hash

_Found = TypeVar("_Found")
_Value = TypeVar("_Value")

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20

LEASE_S = 10.0
"""A client without a heartbeat for this long loses its leased keys. All other times follow from it."""


def beat_s(lease_s: float) -> float:
    """Return the interval of a client's heartbeat, in seconds."""
    return lease_s / 5


def patience_s(lease_s: float) -> float:
    """Return the time without an answer after which a client considers the store lost, before its lease expires."""
    return 0.7 * lease_s


def search_s(lease_s: float) -> float:
    """Return the time without an answer after which a client of several hubs, or members of etcd, considers the store lost.

    A node that is cut off must have killed its workers before the others may restart the job: within
    ``launch.fleet.nodes.FENCE_LEASES`` leases after they have noticed, which takes them a lease.
    """
    return 1.5 * lease_s


Listener = Callable[[str, str | None], None]
"""Receives every change: a key and its value; None if the key was removed, or all keys under it if it ends in ``/``; the
key "" once the store is lost."""


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port."""
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536


def derive_key(token: str, purpose: str) -> bytes:
    """Return a key for one purpose; the token does not follow from it."""
    return keyed_hash(token.encode("utf-8", "surrogatepass"), purpose.encode())


class Store(ABC):
    """Keys and values that all workers and launchers of a job share, and the local copy of them.

    Methods that write raise :class:`~holdfast.errors.StoreLost` if the store does not answer.
    """

    def __init__(self) -> None:
        _stores.add(self)
        self._items: dict[str, str] = {}
        self._folders: dict[str, dict[str, str]] = {}
        """The items whose keys have a ``/``, by what comes before the first one."""
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], object]] = []
        """What threads in :meth:`wait` wait for."""
        self._version = 0
        self._lost = ""
        self._listener: Listener | None = None
        self._signal_fd = -1
        self._acts: dict[str, Callable[[], object]] = {}

    @property
    def signal_fd(self) -> int:
        """An event file descriptor that becomes readable when :attr:`version` changes, for one reader that empties it."""
        with self._changed:
            if self._signal_fd < 0:
                self._signal_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._close_signal = weakref.finalize(self, os.close, self._signal_fd)
                self._close_signal.atexit = False  # the thread that writes to it ends later
            return self._signal_fd

    @property
    def version(self) -> int:
        """Incremented whenever the local copy changes, or the store is lost."""
        return self._version

    @property
    def lost(self) -> str:
        """Why the store is lost, or ""."""
        return self._lost

    _token = ""

    def key_for(self, purpose: str) -> bytes:
        """Return a key that all clients with this token derive alike, and that is never sent; without a token it is no secret."""
        return derive_key(self._token, purpose)

    @property
    @abstractmethod
    def own_address(self) -> str:
        """The address of this machine on the route to the store, at which other machines reach it, too."""

    @abstractmethod
    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """Write a value.

        Args:
            key: At most :data:`MAX_KEY_BYTES`.
            value: At most :data:`MAX_VALUE_BYTES`.
            leased: Whether the key is removed when this client has sent no heartbeat for the duration of a lease.
        """

    @abstractmethod
    def create(self, key: str, value: str) -> bool:
        """Write a value unless the key exists; return whether it was written."""

    @property
    def posts_at_once(self) -> bool:
        """Whether :meth:`post` and :meth:`post_new` do not wait for an answer."""
        return False

    def post(self, key: str, value: str) -> None:
        """Write a value, without waiting for the answer where the store allows that."""
        self.put(key, value)

    def post_new(self, key: str, value: str) -> None:
        """Write a value unless the key exists, without waiting for the outcome where the store allows that."""
        self.create(key, value)

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key; a key that ends in ``/`` removes all keys that begin with it."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; leases expire."""

    def get(self, key: str) -> str | None:
        """Return the value in the local copy, without a request."""
        return self._items.get(key)

    def under(self, prefix: str) -> dict[str, str]:
        """Return the keys of the local copy that begin with ``prefix``, without it, and their values."""
        folder, slash, _ = prefix.partition("/")
        with self._changed:
            items = self._folders.get(folder, {}) if slash else self._items
            return {key[len(prefix) :]: value for key, value in items.items() if key.startswith(prefix)}

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` for all keys, then for every change, in order; it must return quickly and use no store."""
        with self._changed:
            for key, value in self._items.items():
                listener(key, value)
            if self._lost:
                listener("", self._lost)
            self._listener = listener

    def on_key(self, key: str, act: Callable[[], object] | None) -> None:
        """Call ``act`` once, in any thread, as soon as ``key`` exists; None takes that back.

        It must return quickly and use no store.
        """
        with self._changed:
            self._acts.pop(key, None)
            if act is not None and key in self._items:
                act()
            elif act is not None:
                self._acts[key] = act

    def wait(self, ready: Callable[[], _Found | None], timeout_s: float | None = None) -> _Found | None:
        """Return the result of ``ready`` as soon as it is not None; ``ready`` is called after every change.

        Args:
            ready: Reads the local copy, must not use the store otherwise, and returns the same when it is called again.
                It is called in the thread that notes the change, so that this one is woken only when it can continue.
            timeout_s: Time after which None is returned; None waits as long as the store is available.

        Raises:
            StoreLost: if the store is lost and ``ready`` returns None.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._waiting.append(ready)
            try:
                while (result := ready()) is None:
                    if self._lost:
                        raise StoreLost(self._lost)
                    left_s = None if ends_s is None else ends_s - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return None
                    self._changed.wait(left_s)
            finally:
                self._waiting.remove(ready)
            return result

    def _wake(self) -> None:
        """After a change, with the lock held: wake the threads that wait if one of them can continue."""
        if any(_may_continue(ready) for ready in self._waiting):
            self._changed.notify_all()

    def _note(self, key: str, value: str | None) -> None:
        """Apply a change to the local copy; None removes the key, or all keys under it if it ends in ``/``."""
        with self._changed:
            folder, slash, _ = key.partition("/")
            items = self._folders.setdefault(folder, {}) if slash else self._items
            if value is not None:
                self._items[key] = items[key] = value
            else:
                for gone in remove(items, key):
                    self._items.pop(gone, None)
            if self._listener is not None:
                self._listener(key, value)
            if key in self._acts and value is not None:
                self._acts.pop(key)()
            self._announce_change()

    def _announce_change(self) -> None:
        self._version += 1  # after the change, which Roster.check would miss otherwise; before the wake
        self._wake()
        if self._signal_fd >= 0:
            os.eventfd_write(self._signal_fd, 1)

    def _note_lost(self, why: str) -> None:
        with self._changed:
            if self._listener is not None and not self._lost:
                self._listener("", why)
            self._lost = self._lost or why
            with contextlib.suppress(OSError):  # a script has closed the descriptor, which may be why the store is lost
                self._announce_change()
            self._changed.notify_all()

    def _sockets(self) -> list[socket.socket]:
        """Return the open sockets."""
        return []

    def _forget(self) -> None:
        """After a fork, in the child: drop the parent's connections, and locks that a thread of the parent may hold."""
        self._changed, self._waiting = threading.Condition(), []
        if self._signal_fd >= 0:
            self._close_signal()
            self._signal_fd = -1
        self._lost = "the connection to the store belongs to the parent process of a fork"
        for each in self._sockets():
            if (number := each.detach()) >= 0:
                os.close(number)


def _may_continue(ready: Callable[[], object]) -> bool:
    try:
        return ready() is not None
    except Exception:
        return True  # it is raised again in the thread that waits


def remove(items: dict[str, _Value], key: str) -> list[str]:
    """Remove a key, or all keys that begin with it if it ends in ``/``; return those that were there."""
    gone = [name for name in items if name.startswith(key)] if key.endswith("/") else [key] if key in items else []
    for name in gone:
        del items[name]
    return gone


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine on the route to a host; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def best_address(places: Iterable[tuple[str, int]]) -> str:
    """Return the address of this machine on the route to one of several; one on this machine does not show the route."""
    ways = []
    for host, port in places:
        with contextlib.suppress(OSError):  # no route there
            ways.append(address_towards(host, port))
    return min(ways, key=lambda way: way.startswith("127.") or way == "::1", default="127.0.0.1")


_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._forget()


os.register_at_fork(after_in_child=_after_fork)


class SilenceTimer:
    """Time without a message, excluding time in which this process was suspended: ``limit_s`` is too long.

    It must be checked every ``poll_s`` at least; a longer gap counts as a suspension.
    """

    def __init__(self, limit_s: float, poll_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._poll_s = poll_s
        self._clock = clock
        self._since_s = self._looked_s = clock()

    def broken(self, at_s: float) -> None:
        """Record a message which shows that the peer was alive at ``at_s``."""
        self._since_s = max(self._since_s, at_s)

    def is_too_long(self) -> bool:
        """Return whether the silence is too long; time without checks, as while the process was stopped, is excluded."""
        now_s = self._clock()
        held_up_s = max(0.0, now_s - self._looked_s - 2 * self._poll_s)
        self._since_s = min(self._since_s + held_up_s, now_s)
        self._looked_s = now_s
        return now_s - self._since_s > self.limit_s


def check_size(key: str, value: str) -> None:
    """Raise ``ConfigError`` if key or value exceed the limits of a store."""
    try:
        sizes = len(key.encode()), len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{key!r:.80} or its value is not encodable text: {error.reason}") from error
    if sizes[0] > MAX_KEY_BYTES or sizes[1] > MAX_VALUE_BYTES:
        raise ConfigError(
            f"{key!r:.80} with {len(value)} characters is too large for the store; keys may have {MAX_KEY_BYTES} bytes, values {MAX_VALUE_BYTES}"
        )
