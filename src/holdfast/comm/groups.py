"""PyTorch's own process groups, as far as :mod:`~holdfast.comm.c10d` needs them: made, waited for, given up.

Nothing of theirs can be interrupted: not the making of a group, whose other members may die meanwhile, and not what it
carries out. So all of it runs in threads that can be left behind, with the memory that they use; the group is ended there
too, because that waits for what it still does.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.errors import PeerFailed
from holdfast.membership import Store
from holdfast.torch_private import gloo_options

FOREVER = timedelta(days=1)
"""How long a group may take for an operation: nobody can tell here whether the others are slow or cannot be reached."""

_NOBODYS_TAG = (1 << 30) + 1
"""A tag that no message has."""

_SPINS = 20
"""How often a work is looked at before the thread naps."""
_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 2e-3
_NAP_SHARE = 8
"""A nap is as long as this part of the wait until now, so that it delays little and long waits cost little."""


class Work(Protocol):
    """Something that goes on by itself."""

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""

    def wait(self, timeout: timedelta) -> Any:
        """Complain, once it is over, if it did not end well."""


class Aside:
    """Work that can only be waited for, done in a thread of its own so that it can be given up, with the memory that it uses (``keep``)."""

    def __init__(self, act: Callable[[], Any], keep: object = None) -> None:
        self._task: tuple[Callable[[], Any], object] | None = (act, keep)
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-aside", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta = FOREVER) -> Any:
        """Return the result; see :meth:`Work.wait`."""
        self._thread.join(min(timeout.total_seconds(), threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        assert self._task is not None
        try:
            self._result = self._task[0]()
        except BaseException as error:  # whoever waits gets it
            traceback.clear_frames(error.__traceback__)  # which would keep what is waited for, in a circle
            self._error = error
        self._task = None


def wait(work: Work, check: Callable[[], None]) -> Any:
    """Return the result of ``work``, and call ``check`` meanwhile, which may raise: then the work goes on unattended."""
    begun_s = time.monotonic()
    for _ in range(_SPINS):
        if work.is_completed():
            return work.wait(FOREVER)
    while not work.is_completed():
        waited_s = time.monotonic() - begun_s
        time.sleep(min(max(waited_s / _NAP_SHARE, _SHORTEST_NAP_S), _LONGEST_NAP_S))
        check()
    return work.wait(FOREVER)


class Sending:
    """What is on its way to others: kept, in a thread of its own, until it has left; only who waits learns of that."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holdfast-sending", daemon=True).start()

    def add(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` until ``work`` is over, well or not."""
        self._left.put((work, data))

    def end(self) -> None:
        """Let the thread end, after what was added."""
        self._left.put(None)

    def _run(self) -> None:
        while (item := self._left.get()) is not None:
            with contextlib.suppress(RuntimeError):  # who waits for a peer hears of it
                item[0].wait()
            del item


@contextmanager
def as_peer_failure() -> Iterator[None]:
    """Whatever a process group complains of, closed, reset or timed out, means that a peer has failed."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(str(error)) from error


class Meeting(dist.Store):  # type: ignore[name-defined,misc]  # torch has no stubs for it
    """Where the processes of a group tell each other their addresses: keys of the store that membership is kept in, under a prefix."""

    def __init__(self, store: Store, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._given_up = False

    def give_up(self) -> None:
        """Let every wait fail; a thread that was left behind ends at the next change of the store."""
        self._given_up = True

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else value
        self._store.put(self._prefix + key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Return a value, as soon as there is one."""
        self.wait([key])
        value = self._store.get(self._prefix + key)
        assert value is not None
        return base64.b64decode(value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values; ``PeerFailed`` if they did not come in time, or the group was given up."""
        limit_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)
        if self._store.wait(lambda: self._given_up or self.check(keys) or None, limit_s) is None or self._given_up:
            raise PeerFailed(f"not everybody said where to find it, within {limit_s:g} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(self._store.get(self._prefix + key) is not None for key in keys)

    def has_extended_api(self) -> bool:
        """Return that there is nothing more."""
        return False


def make_gloo(meeting: Meeting, place: int, size: int, address: str, timeout_s: float) -> Any:
    """Return a group of Gloo's, for CPU tensors: the process number ``place`` of ``size``.

    The others reach this machine at ``address``; ``GLOO_SOCKET_IFNAME`` overrules it. Connections must be made in time.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    make = dist.ProcessGroupGloo.create_device
    devices = [make(interface=name) for name in interfaces.split(",") if name] or [make(hostname=address)]
    group = dist.ProcessGroupGloo(meeting, place, size, gloo_options(timedelta(seconds=timeout_s), devices))
    group.set_timeout(FOREVER)
    return group


def _hang_up(group: Any) -> None:
    """Close the connections of a group of Gloo's, which ends what waits in it for members that live on.

    There is no call for it, but Gloo closes them all when a wait runs out of time; nobody sends with this tag.
    """
    for place in range(group.size()):
        if place != group.rank():
            with contextlib.suppress(RuntimeError):  # it ran out of time, or that one is closed already
                group.recv([torch.empty(1)], place, _NOBODYS_TAG).wait(timedelta(milliseconds=1))


def bury(group: Any) -> None:
    """End a group, aside."""
    remains = [group]  # so that the last reference goes where the waiting is done
    del group

    def end() -> None:
        group = remains.pop()
        _hang_up(group)
        try:
            group.abort()
            group.shutdown()
        except RuntimeError as error:
            sys.stderr.write(f"holdfast: an old process group did not end well: {error}\n")

    threading.Thread(target=end, name="holdfast-bury", daemon=True).start()
