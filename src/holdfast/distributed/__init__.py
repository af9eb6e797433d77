"""A ``torch.distributed`` backend: ``init_process_group("holdfast")`` is the only change that a DDP script needs.

Importing this module registers the backend. torch imports it through an entry point where Holdfast is installed, so the
backend name alone is enough. Start with ``holdfast run -n 4 SCRIPT``, with ``--fabric gloo`` where there is no MPI, or
with ``mpirun --with-ft ulfm -n 4 python SCRIPT``.

When a rank fails, the all-reduces of ``DistributedDataParallel`` are retried over the survivors and averaged over them.
So are the script's own sums, barriers, broadcasts and gathers of metrics (``--empty-seats``). A collective of parts of a
state raises :class:`~holdfast.errors.RanksLost` once, on every survivor, and works again afterwards.
Ranks and group sizes do not change; :func:`alive` returns the surviving ranks, and :func:`is_lead` whether this is the
lowest of them, which saves and logs. With ``--spares`` or ``--respawn``, a new
process takes the rank of a failed one, if the script calls :func:`register`.
"""

from __future__ import annotations

import os
from typing import Any


def autoload() -> None:
    """Entry point that torch calls when it is imported, or looks up the backend; importing this module registered it.

    It is defined above the import of torch, which calls it before that import ends. Lightning has no entry point for
    strategies, so theirs begins here.
    """
    from holdfast.distributed.discovery import install

    install()


import torch.distributed as dist  # noqa: E402

from holdfast.distributed.frameworks import adapt_frameworks  # noqa: E402
from holdfast.distributed.monitored import let_torch_call_it  # noqa: E402
from holdfast.distributed.registering import register  # noqa: E402
from holdfast.distributed.rendezvous import watch_rendezvous  # noqa: E402
from holdfast.errors import RanksLost  # noqa: E402

__all__ = ["RanksLost", "alive", "is_lead", "register"]

BACKEND = "holdfast"
"""Backend name for ``init_process_group``."""


def alive(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the global ranks of ``group`` (default: all) that are alive, as far as this rank knows, ascending.

    Raises:
        ValueError: if the group does not use this backend.
    """
    from holdfast.distributed.group import HoldfastGroup

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, HoldfastGroup):
        raise ValueError(f"alive() is for groups of the {BACKEND!r} backend, got {group}")
    return group.alive


def is_lead() -> bool:
    """Return whether this is the lowest surviving rank, as far as this rank knows: the one that saves and logs.

    ::

        if holdfast.distributed.is_lead():  # in place of: if dist.get_rank() == 0
            torch.save(model.module.state_dict(), "model.pt")

    Ask each time, as another rank becomes the lead when the lead is lost. Collectives must not stand under it: the other
    ranks do not call them. In a process group of another backend this is rank 0, and without one as well; a script that
    is started alone is rank 0.
    """
    from holdfast.distributed.group import HoldfastGroup

    if not dist.is_initialized():
        return int(os.environ.get("RANK") or 0) == 0
    group = dist.group.WORLD
    if not isinstance(group, HoldfastGroup):
        return dist.get_rank() == 0
    answer = group.alive[0] == group.rank()
    group.engine.recorder.asked_lead(answer)
    return answer


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    from holdfast.distributed.group import create

    return create(options)


def _set_torchrun_variables() -> None:
    """Set the variables of ``env://`` under a bare mpirun on one host, unless they are set already."""
    for name, source in (
        ("RANK", "OMPI_COMM_WORLD_RANK"),
        ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        if source in os.environ:
            spares = int(os.environ.get("HOLDFAST_SPARES") or 0) if name == "WORLD_SIZE" else 0
            os.environ.setdefault(name, str(int(os.environ[source]) - spares))
    if os.environ.get("OMPI_COMM_WORLD_SIZE") == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""):
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")


def adapt_to_job() -> None:
    """Adapt torch and the frameworks to the job that the environment describes; once in a process of a job.

    A worker that is forked with torch imported calls it again: it has another environment than its parent.
    """
    _set_torchrun_variables()
    adapt_frameworks()
    watch_rendezvous()


if dist.is_available() and BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    let_torch_call_it()
    adapt_to_job()
