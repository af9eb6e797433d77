"""Completes a rendezvous of ``torch.distributed`` without the ranks that have died before it.

In an ``env://`` rendezvous rank 0 hosts a store and waits for all ranks, and all ranks wait for rank 0, for as long as
the timeout of the group: half an hour by default. Under ``mpirun`` the launcher restarts a job in which a rank dies so
early. Over Gloo the job begins without the dead ranks, and they are missed at the first collective. For that the lowest
rank alive does in the rendezvous what the dead ranks would have done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

# This module is loaded with torch: what only a rendezvous needs is imported there.

_LOOK_EVERY_S = 0.05
_PATIENCE_S = 2.0
"""A rendezvous that still waits this long after the death of a rank waits for that rank."""

_hosted: list[Any] = []
"""The store that this process hosts in place of rank 0; other ranks need it as long as they make groups."""


def watch_rendezvous() -> None:
    """Watch each ``env://`` rendezvous of this process, if the job has a membership store."""
    if os.environ.get("HOLDFAST_STORE"):
        from holdfast.torch_private import rendezvous_handlers

        handlers = rendezvous_handlers()
        meet = handlers["env"]

        def watched(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
            _leave_if_new()
            its = meet(url, timeout=timeout, **kwargs)
            yield _first_of(its, timeout)
            yield from its

        handlers["env"] = watched


def _leave_if_new() -> None:
    """End a worker that was started in place of a failed one: a process group takes no new ranks."""
    from holdfast.config import Settings

    settings = Settings.from_env()
    if str(settings.rank) not in settings.ranks.split(","):
        sys.stderr.write(
            f"holdfast: rank {settings.rank} ends: a torch.distributed job takes no new ranks, start it without --respawn\n"
        )
        raise SystemExit(0)  # with another code the launcher would start one more


def _first_of(its: Iterator[Any], timeout: timedelta) -> Any:
    """Return the outcome of the rendezvous; stand in for ranks that have died."""
    from holdfast.comm.groups import ThreadedWork
    from holdfast.config import Settings
    from holdfast.membership import open_store

    settings = Settings.from_env()
    store = open_store(settings.store, settings.token)
    meeting = ThreadedWork(lambda: next(its))
    seen_s: dict[int, float] = {}
    helped: set[int] = set()
    while not meeting.is_completed():
        time.sleep(_LOOK_EVERY_S)
        for place, rank in enumerate(settings.ranks.split(",")):
            if store.get(f"dead/{rank}") is not None:
                seen_s.setdefault(place, time.monotonic())
        lowest = min(set(range(len(settings.ranks.split(",")))) - seen_s.keys(), default=-1)
        for place, since_s in seen_s.items():
            if place not in helped and os.environ["RANK"] == str(lowest) and time.monotonic() - since_s > _PATIENCE_S:
                helped.add(place)
                _stand_in(place, timeout)
    store.close()
    return meeting.wait()


def _stand_in(place: int, timeout: timedelta) -> None:
    """Host the store in place of rank 0, or count as another rank in it."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size, is_host = int(os.environ["WORLD_SIZE"]), place == 0
    make: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch has no stubs for it
    store = make(address, port, size, is_host, timeout, wait_for_workers=not is_host)
    if is_host:
        _hosted.append(store)
