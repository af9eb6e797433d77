"""Selects the fabric, and connects this process to the other workers."""

from __future__ import annotations

import os

from holdfast.comm.base import Communicator, MessageCommunicator
from holdfast.comm.fabrics.base import EndNotes, Endpoint
from holdfast.comm.fabrics.registry import DEFAULT, make_fabric
from holdfast.comm.launchers import chosen, others_started
from holdfast.errors import ConfigError


def connect(
    fabric: str,
    workers: int,
    ranks: str,
    *,
    rank: int = -1,
    store: str = "",
    token: str = "",
    end_notes: EndNotes | None = None,
    run_dir: str = "",
) -> Communicator:
    """Return the communicator of this process.

    Args:
        fabric: A name of :mod:`~holdfast.comm.fabrics.registry`, or "" for ``ulfm`` under mpirun and
            one virtual worker otherwise.
        workers: Number of workers, where the launcher does not set it.
        ranks: Comma-separated ranks of the workers, or "" for 0, 1, 2, ...
        rank: This worker's rank; required by ``gloo``.
        store: URL of the membership store; required by ``gloo``.
        token: Access token of the store.
        end_notes: Says whether and where a worker ends; see :class:`~holdfast.comm.fabrics.base.Endpoint`.
        run_dir: Folder of the run, which all hosts share; "" if there is none.

    Raises:
        ConfigError: if the fabric cannot work here; or if none was given, and another launcher started this process as
            one of several. Each would train alone, and all would save to the same place.
    """
    name = chosen(fabric)
    endpoint = _endpoint(workers, ranks, rank, store, token, end_notes, run_dir)
    if not fabric and name == "virtual" and (reason := others_started(os.environ)):
        raise ConfigError(reason)
    return make_fabric(name).connect(endpoint)


def connect_messages(
    fabric: str,
    workers: int,
    ranks: str,
    *,
    rank: int = -1,
    store: str = "",
    token: str = "",
    end_notes: EndNotes | None = None,
    run_dir: str = "",
) -> MessageCommunicator:
    """Return the communicator of this process for the ``torch.distributed`` backend.

    The arguments are those of :func:`connect`; ``fabric`` "" is ``ulfm``, because each rank needs a process.

    Raises:
        ConfigError: if the fabric cannot work here, or has no such communicator.
    """
    return make_fabric(fabric or DEFAULT).connect_messages(
        _endpoint(workers, ranks, rank, store, token, end_notes, run_dir)
    )


def _endpoint(
    workers: int, ranks: str, rank: int, store: str, token: str, end_notes: EndNotes | None, run_dir: str
) -> Endpoint:
    numbers = [int(number) for number in ranks.split(",")] if ranks else None
    if numbers is not None and numbers != sorted(set(numbers)):
        raise ConfigError(f"ranks must be ascending, each once, got {ranks}")
    return Endpoint(
        workers=workers, ranks=numbers, rank=rank, store=store, token=token, end_notes=end_notes, run_dir=run_dir
    )
