"""PyTorch process groups, as :mod:`~holdfast.comm.c10d` uses them: created, waited for, abandoned.

Neither the creation of a process group, during which members may fail, nor its operations can be interrupted. Both
therefore run in threads that can be left behind together with the memory they use. The group is also destroyed in such
a thread, because that blocks until pending operations end.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.base.device_errors import DeviceFailure, classify
from holdfast.base.side_work import say
from holdfast.base.torch_private import gloo_options
from holdfast.errors import InternalError, PeerFailed
from holdfast.membership import Store
from holdfast.membership.roster import gathered

FOREVER = timedelta(days=1)
"""Timeout of an operation of the group: a slow peer cannot be told here from an unreachable one."""

_UNUSED_TAG = (1 << 30) + 1
"""A tag that no message uses."""

_SPINS = 20
"""Number of polls before the thread sleeps."""
_SHORTEST_NAP_S = 2e-5
_LONGEST_NAP_S = 2e-3
_NAP_SHARE = 8
"""A sleep lasts this fraction of the time waited so far: short waits see little delay, long ones cost little CPU."""


class GroupWork(Protocol):
    """An asynchronous operation."""

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""

    def wait(self, timeout: timedelta) -> Any:
        """Raise the error of an operation that has ended unsuccessfully."""


class ThreadedWork:
    """A blocking call in its own thread, so that it can be abandoned; ``keep`` holds the memory that it uses."""

    def __init__(self, act: Callable[[], Any], keep: object = None) -> None:
        self._task: tuple[Callable[[], Any], object] | None = (act, keep)
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-aside", daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta = FOREVER) -> Any:
        """Return the result; see :meth:`GroupWork.wait`."""
        self._thread.join(min(timeout.total_seconds(), threading.TIMEOUT_MAX))
        if self._error is not None:
            raise self._error
        return self._result

    def take(self) -> Any:
        """Return the result as :meth:`wait` does, and keep no reference to it."""
        result, self._result = self.wait(), None
        return result

    def pause(self, longest_s: float) -> None:
        """Sleep until the call has ended, or for ``longest_s``."""
        self._thread.join(longest_s)

    def _run(self) -> None:
        assert self._task is not None
        try:
            self._result = self._task[0]()
        except BaseException as error:  # raised again in wait()
            traceback.clear_frames(error.__traceback__)  # the frames would keep this object alive in a reference cycle
            self._error = error
        self._task = None


def wait(work: GroupWork, check: Callable[[], None]) -> Any:
    """Return the result of ``work``; call ``check`` meanwhile. If ``check`` raises, the operation is left running."""
    begun_s = time.monotonic()
    pause = work.pause if isinstance(work, ThreadedWork) else time.sleep  # a thread wakes its waiter, Gloo does not
    for _ in range(_SPINS):
        if work.is_completed():
            return work.wait(FOREVER)
    while not work.is_completed():
        waited_s = time.monotonic() - begun_s
        pause(min(max(waited_s / _NAP_SHARE, _SHORTEST_NAP_S), _LONGEST_NAP_S))
        check()
    return work.wait(FOREVER)


class PendingSends:
    """Sends in flight: a thread keeps their memory until they complete, which Gloo reports only to a waiting thread."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[Any, torch.Tensor] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="holdfast-sending", daemon=True).start()

    def add(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` until ``work`` has ended, successfully or not."""
        self._left.put((work, data))

    def end(self) -> None:
        """Let the thread end once all that was added has completed."""
        self._left.put(None)

    def _run(self) -> None:
        while (item := self._left.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the next wait for that peer reports its failure
                item[0].wait()
            del item


@contextmanager
def as_peer_failure() -> Iterator[None]:
    """Convert any error of a process group (closed, reset, timed out) to ``PeerFailed``, but not one of our own device."""
    try:
        yield
    except RuntimeError as error:
        if classify(error) in (DeviceFailure.LOST, DeviceFailure.OUT_OF_MEMORY):
            raise
        raise PeerFailed(str(error)) from error


class AddressExchange(dist.Store):  # type: ignore[name-defined,misc]  # torch has no stubs for it
    """The rendezvous of a process group: its members gather what each of them publishes first, its address.

    Args:
        store: The membership store.
        prefix: Prefix of the keys of an act that gathers texts, see :mod:`holdfast.membership.acts`.
        rank: This worker.
        timeout_s: Time within which all of them must have published their address.
    """

    def __init__(self, store: Store, prefix: str, rank: int, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._timeout_s = timeout_s
        self._addresses: dict[str, bytes] = {}
        self._has_published = self._given_up = False

    def give_up(self) -> None:
        """Make every wait fail; an abandoned thread ends at the next change of the store."""
        self._given_up = True

    def set(self, key: str, value: bytes | str) -> None:
        """Publish this worker's address, once."""
        if self._has_published:
            raise InternalError(f"a process group has published a second value, {key}")
        self._has_published = True
        data = value.encode() if isinstance(value, str) else value
        self._store.put(f"{self._prefix}{self._rank}", f"{key} {base64.b64encode(data).decode()}")

    def get(self, key: str) -> bytes:
        """Return a value, waiting until all members have published theirs."""
        self.wait([key])
        return self._addresses[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; ``PeerFailed`` on timeout, or if the rendezvous was given up.

        The time limit of the process group is for connecting: a member that is late is no failure.
        """
        outcome = self._store.wait(lambda: self._given_up or self.check(keys) or None, self._timeout_s)
        if outcome is None or self._given_up:
            raise PeerFailed(f"not every member published its address within {self._timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        if not self._addresses and (texts := gathered(self._store, self._prefix)):
            pairs = (text.split(" ") for text in texts.values())
            self._addresses = {key: base64.b64decode(value) for key, value in pairs}
        return all(key in self._addresses for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: the extended store API is not implemented."""
        return False


def make_gloo(meeting: AddressExchange, place: int, size: int, address: str, timeout_s: float) -> Any:
    """Return a Gloo process group for CPU tensors, with rank ``place`` of ``size``.

    Peers connect to this machine at ``address``, unless ``GLOO_SOCKET_IFNAME`` is set.
    """
    os.environ["GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"] = "1"  # an address is then as long for any number of peers
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    make = dist.ProcessGroupGloo.create_device
    devices = [make(interface=name) for name in interfaces.split(",") if name] or [make(hostname=address)]
    group = dist.ProcessGroupGloo(meeting, place, size, gloo_options(timedelta(seconds=timeout_s), devices))
    group.set_timeout(FOREVER)
    return group


def _hang_up(group: Any) -> None:
    """Close the connections of a Gloo group, which ends its pending operations with surviving members.

    Gloo has no call for this, but closes all connections when a wait times out. No message uses this tag, so it does.
    """
    for place in range(group.size()):
        if place != group.rank():
            with contextlib.suppress(RuntimeError):  # it timed out, or that connection is closed already
                group.recv([torch.empty(1)], place, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def bury(group: Any) -> None:
    """Destroy a group in the background."""
    remains = [group]  # so that the thread drops the last reference, which blocks
    del group

    def end() -> None:
        group = remains.pop()
        _hang_up(group)
        try:
            group.abort()
            group.shutdown()
        except RuntimeError as error:
            say(f"cannot shut down an old process group cleanly: {error}")

    threading.Thread(target=end, name="holdfast-bury", daemon=True).start()


def bury_made(making: ThreadedWork) -> None:
    """Destroy the group that ``making`` returns, if it returns one, in the background."""

    def end() -> None:
        with contextlib.suppress(Exception):  # no group was made
            bury(making.take())

    threading.Thread(target=end, name="holdfast-bury", daemon=True).start()
