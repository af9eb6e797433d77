"""What membership asks of a store, and the local copy that every client keeps of it.

A store holds short strings under keys. What makes it fit for decisions is :meth:`Store.create`: of all who try to be the
first to write a key one succeeds, and everybody reads what that one wrote. Everybody is told of every change, so that
reading, and waiting for something, cost no message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from holdfast.errors import ConfigError, StoreLost

_Found = TypeVar("_Found")

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1 << 20


class Store(Protocol):
    """Keys and values that all workers and launchers of a job share."""

    @property
    def version(self) -> int:
        """Grows whenever the local copy changes, or the store is lost."""
        ...

    @property
    def lost(self) -> str:
        """Why the store cannot be reached any more, "" as long as it can."""
        ...

    @property
    def own_address(self) -> str:
        """The address of this machine on the way to the store: others reach us there, too."""
        ...

    def get(self, key: str) -> str | None:
        """Return the value as far as it is known here, without asking."""
        ...

    def under(self, prefix: str) -> dict[str, str]:
        """Return what is known here of the keys that begin with ``prefix``, by the rest of the key."""
        ...

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """Write a value.

        Args:
            key: Which; at most :data:`MAX_KEY_BYTES`.
            value: At most :data:`MAX_VALUE_BYTES`.
            leased: It goes when this client has not been heard of for the time of a lease.

        Raises:
            StoreLost: if the store does not answer.
        """
        ...

    def create(self, key: str, value: str) -> bool:
        """Write a value unless there is one; return whether there was none.

        Raises:
            StoreLost: if the store does not answer.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Remove all keys that begin with ``prefix``.

        Raises:
            StoreLost: if the store does not answer.
        """
        ...

    def wait(self, ready: Callable[[], _Found | None], timeout_s: float | None = None) -> _Found | None:
        """Return what ``ready`` returns as soon as it is not None; it is asked again after every change.

        Args:
            ready: Looks at the local copy; must not call the store otherwise.
            timeout_s: Then None is returned; None waits as long as the store is there.

        Raises:
            StoreLost: if the store is lost and ``ready`` has nothing.
        """
        ...

    def close(self) -> None:
        """Let go of the store."""
        ...


class Mirror:
    """The local copy of a store's keys."""

    def __init__(self) -> None:
        self._items: dict[str, str] = {}
        self._changed = threading.Condition()
        self._version = 0
        self._lost = ""

    @property
    def version(self) -> int:
        """See :attr:`Store.version`."""
        return self._version

    @property
    def lost(self) -> str:
        """See :attr:`Store.lost`."""
        return self._lost

    def get(self, key: str) -> str | None:
        """See :meth:`Store.get`."""
        return self._items.get(key)

    def under(self, prefix: str) -> dict[str, str]:
        """See :meth:`Store.under`."""
        with self._changed:
            return {key[len(prefix) :]: value for key, value in self._items.items() if key.startswith(prefix)}

    def wait(self, ready: Callable[[], _Found | None], timeout_s: float | None = None) -> _Found | None:
        """See :meth:`Store.wait`."""
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


def check_size(key: str, value: str) -> None:
    """Make sure that a store takes this.

    Raises:
        ConfigError: if not.
    """
    if len(key.encode()) > MAX_KEY_BYTES or len(value.encode()) > MAX_VALUE_BYTES:
        msg = f"{key!r:.80} with {len(value)} characters is too large for the store; keys may have {MAX_KEY_BYTES} bytes, values {MAX_VALUE_BYTES}"
        raise ConfigError(msg)


def open_store(url: str, token: str) -> Store:
    """Return the store at ``url``, a ``holdfast://HOST:PORT/JOB`` as the launcher's hub has it.

    Raises:
        ConfigError: if there is no such kind of store.
        StoreLost: if it cannot be reached.
    """
    kind, _, rest = url.partition("://")
    if kind == "holdfast":
        from holdfast.membership.client import HubStore

        address, _, job = rest.partition("/")
        return HubStore(address, token, job)
    msg = f"the store must be holdfast://HOST:PORT/JOB, got {url!r}"
    raise ConfigError(msg)
