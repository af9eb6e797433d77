"""A part of a store: a second group of the same workers, whose agreements must not mix with those of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from holdfast.membership.store import Store

_SHARED = "dead/"
"""Keys of the whole job: the launchers report each failed worker once."""
_KEYED = ("get", "under", "put", "create", "post", "post_new", "delete", "on_key", "key_for")
"""The methods whose first argument is a key, or the beginning of keys."""


class _StoreScope:
    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the store; a method of :data:`_KEYED` puts the prefix before the key."""
        attribute: Callable[..., Any] = getattr(self._store, name)
        if name not in _KEYED:
            return attribute

        def keyed(key: str, *arguments: Any, **options: Any) -> Any:
            return attribute(key if key.startswith(_SHARED) else self._prefix + key, *arguments, **options)

        return keyed


def store_scope(store: Store, prefix: str) -> Store:
    """Return the keys of ``store`` that begin with ``prefix``, without it; and its reports of failed workers."""
    return cast("Store", _StoreScope(store, prefix))
