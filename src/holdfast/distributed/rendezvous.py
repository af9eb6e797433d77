"""Completes a rendezvous of ``torch.distributed`` without the ranks that have died before it.

In an ``env://`` rendezvous rank 0 hosts a store and waits for all ranks, and all ranks wait for rank 0, for as long as
the timeout of the group: half an hour by default. Under ``mpirun`` the launcher restarts a job in which a rank dies so
early. Over Gloo the job begins without the dead ranks, and they are missed at the first collective. For that the lowest
rank alive does in the rendezvous what the dead ranks would have done.

A newcomer meets no other rank: it waits until the seat of a failed rank is empty, and takes its number.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.config import Settings

# This module is loaded with torch: what only a rendezvous needs is imported there.

_LOOK_EVERY_S = 0.05
_PATIENCE_S = 2.0
"""A rendezvous that still waits this long after the death of a rank waits for that rank."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_hosted: list[Any] = []
"""The store that this process hosts in place of rank 0; other ranks need it as long as they make groups."""


def watch_rendezvous() -> None:
    """Watch each rendezvous of this process: of a newcomer, and by ``env://`` if the job has a membership store."""
    has_store = bool(os.environ.get("HOLDFAST_STORE"))
    if not has_store and not os.environ.get("HOLDFAST_SPARES"):
        return
    from holdfast.base.torch_private import rendezvous_handlers

    handlers = rendezvous_handlers()
    for scheme, meet in list(handlers.items()):
        handlers[scheme] = _watched(meet, helps=has_store and scheme == "env")


def _watched(meet: Callable[..., Iterator[Any]], *, helps: bool) -> Callable[..., Iterator[Any]]:
    def watched(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        if _is_newcomer():
            _check_backend()
            yield _alone()
            return
        if helps:
            _check_place()
        hosted = _host_on_loopback() if helps else None
        outcomes = meet(url, timeout=timeout, **kwargs)
        if helps:
            yield _first_of(outcomes, timeout)
        del hosted  # torch's own store keeps the server that it found
        yield from outcomes

    return watched


def _check_place() -> None:
    """Refuse a rendezvous of ranks on several nodes whose launchers were not told where: it would wait for half an hour.

    Raises:
        ConfigError: if so; not if the script has chosen another place itself.
    """
    from holdfast.engine.start_rank import CHOSEN_ALONE
    from holdfast.errors import ConfigError

    env = os.environ
    place = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    if place == env.get(CHOSEN_ALONE) and env.get("WORLD_SIZE") != env.get("LOCAL_WORLD_SIZE"):
        raise ConfigError(
            "the ranks of several nodes have no place to meet: set MASTER_ADDR and MASTER_PORT for all launchers, to an"
            " address of the first node and a free port there"
        )


def _host_on_loopback() -> Any:
    """In rank 0 of a job on one machine, host the store of the rendezvous on loopback, where torch finds and uses it.

    Torch itself listens on all interfaces, and its store asks for no secret.

    Returns:
        The store, to be kept until torch has its own; None where torch hosts it, or says why it cannot.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    listener = _listen_on_loopback(address, port) if os.environ.get("RANK") == "0" else None
    if listener is None:
        return None
    return _open_store(listener, address, int(port), is_master=True, wait_for_workers=False, multi_tenant=True)


def _open_store(listener: int | None, *where: Any, **how: Any) -> Any:
    """Return a store of torch, which takes the socket that listens; close that if torch fails before it has taken it."""
    import torch.distributed as dist

    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch has no stubs for it
    its_number = None if listener is None else os.fstat(listener).st_ino
    try:
        return make(*where, **how, master_listen_fd=listener)
    except BaseException:
        if listener is not None:
            with contextlib.suppress(OSError):  # torch has closed it
                if os.fstat(listener).st_ino == its_number:
                    os.close(listener)
        raise


def _listen_on_loopback(address: str, port: str) -> int | None:
    """Return a socket that listens there; None if that is no loopback address, or the port cannot be had."""
    if address not in _LOOPBACK or not port.isdecimal():
        return None
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, int(port)), family=family, backlog=socket.SOMAXCONN).detach()
    except (OSError, OverflowError):  # an earlier group of this process has it, or another program
        return None


def _check_backend() -> None:
    """End a newcomer whose group has another backend, or whose script has a session: those take no new ranks.

    Raises:
        ConfigError: in a spare, which the others of its session wait for.
    """
    from holdfast.config import Settings
    from holdfast.distributed.recorder import has_session
    from holdfast.errors import ConfigError

    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    backend = "" if frame is None else str(frame.f_locals.get("backend")).lower()
    if "holdfast" in backend and not has_session():
        return
    what = "a group of a script with a session" if has_session() else f"a group of the backend {backend or None}"
    settings = Settings.from_env()
    if settings.spares:
        raise ConfigError(f"{what} takes no spares: start without --spares")
    sys.stderr.write(f"holdfast: rank {settings.rank} ends: {what} takes no new ranks, start without --respawn\n")
    raise SystemExit(0)  # with another code the launcher would start one more


def _first_ranks(settings: Settings) -> list[str]:
    """Return the workers that have a rank from the start: all but the spares."""
    ranks = settings.ranks.split(",")
    return ranks[: len(ranks) - settings.spares]


def _is_newcomer() -> bool:
    """Return whether this worker has no rank yet: a spare, or one that was started in place of a failed one."""
    from holdfast.config import Settings
    from holdfast.engine.start_rank import rank_at_start

    settings = Settings.from_env()
    rank = rank_at_start(settings)
    if settings.ranks:
        return str(rank) not in _first_ranks(settings)
    return rank >= int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) - settings.spares


def _alone() -> Any:
    """Wait for an empty seat, and return the outcome of a rendezvous that needs no other rank."""
    import torch.distributed as dist

    from holdfast.base import notice
    from holdfast.distributed.comm_thread import get_engine
    from holdfast.distributed.debug_mode import debug_wanted

    notice.decline()
    engine = get_engine(debug=debug_wanted(), waits=True)
    seat, size = engine.meeting.wait_for_offer(), engine.world.first_size
    os.environ.update(RANK=str(seat), WORLD_SIZE=str(size))
    make: Any = getattr(dist, "HashStore")  # noqa: B009 - torch has no stubs for it
    return make(), seat, size


def _first_of(outcomes: Iterator[Any], timeout: timedelta) -> Any:
    """Return the outcome of the rendezvous; stand in for ranks that have died."""
    from holdfast.comm.groups import ThreadedWork
    from holdfast.config import Settings
    from holdfast.membership import open_store

    settings = Settings.from_env()
    store = open_store(settings.store, settings.token)
    meeting = ThreadedWork(lambda: next(outcomes))
    seen_s: dict[int, float] = {}
    helped: set[int] = set()
    while not meeting.is_completed():
        time.sleep(_LOOK_EVERY_S)
        for place, rank in enumerate(_first_ranks(settings)):
            if store.get(f"dead/{rank}") is not None:
                seen_s.setdefault(place, time.monotonic())
        lowest = min(set(range(len(_first_ranks(settings)))) - seen_s.keys(), default=-1)
        for place, since_s in seen_s.items():
            if place not in helped and os.environ["RANK"] == str(lowest) and time.monotonic() - since_s > _PATIENCE_S:
                helped.add(place)
                _stand_in(place, timeout)
    store.close()
    return meeting.wait()


def _stand_in(place: int, timeout: timedelta) -> None:
    """Host the store in place of rank 0, or count as another rank in it."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    size, is_host = int(os.environ["WORLD_SIZE"]), place == 0
    listener = _listen_on_loopback(address, port) if is_host else None
    store = _open_store(listener, address, int(port), size, is_host, timeout, wait_for_workers=not is_host)
    if is_host:
        _hosted.append(store)
