"""A part of a store: a second group of the same workers, whose agreements must not mix with those of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.membership.store import Store

_Found = TypeVar("_Found")
_SHARED = "dead/"
"""Keys of the whole job: the launchers report each failed worker once."""


class StoreScope(Store):
    """The keys of ``store`` that begin with ``prefix``, without it; and its reports of failed workers."""

    def __init__(self, store: Store, prefix: str) -> None:
        # It keeps no copy and no connection of its own, so there is nothing for the constructor of Store to set up.
        self._store = store
        self._prefix = prefix

    def _key(self, key: str) -> str:
        return key if key.startswith(_SHARED) else self._prefix + key

    @property
    def version(self) -> int:
        """See :attr:`Store.version`."""
        return self._store.version

    @property
    def lost(self) -> str:
        """See :attr:`Store.lost`."""
        return self._store.lost

    def key_for(self, purpose: str) -> bytes:
        """See :meth:`Store.key_for`."""
        return self._store.key_for(self._prefix + purpose)

    @property
    def own_address(self) -> str:
        """See :attr:`Store.own_address`."""
        return self._store.own_address

    def put(self, key: str, value: str, *, leased: bool = False) -> None:
        """See :meth:`Store.put`."""
        self._store.put(self._key(key), value, leased=leased)

    def create(self, key: str, value: str) -> bool:
        """See :meth:`Store.create`."""
        return self._store.create(self._key(key), value)

    @property
    def posts_at_once(self) -> bool:
        """See :attr:`Store.posts_at_once`."""
        return self._store.posts_at_once

    def post(self, key: str, value: str) -> None:
        """See :meth:`Store.post`."""
        self._store.post(self._key(key), value)

    def post_new(self, key: str, value: str) -> None:
        """See :meth:`Store.post_new`."""
        self._store.post_new(self._key(key), value)

    def delete(self, key: str) -> None:
        """See :meth:`Store.delete`."""
        self._store.delete(self._key(key))

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self._store.close()

    def get(self, key: str) -> str | None:
        """See :meth:`Store.get`."""
        return self._store.get(self._key(key))

    def under(self, prefix: str) -> dict[str, str]:
        """See :meth:`Store.under`."""
        return self._store.under(self._key(prefix))

    @property
    def signal_fd(self) -> int:
        """See :attr:`Store.signal_fd`."""
        return self._store.signal_fd

    def on_key(self, key: str, act: Callable[[], object] | None) -> None:
        """See :meth:`Store.on_key`."""
        self._store.on_key(self._key(key), act)

    def wait(self, ready: Callable[[], _Found | None], timeout_s: float | None = None) -> _Found | None:
        """See :meth:`Store.wait`."""
        return self._store.wait(ready, timeout_s)
