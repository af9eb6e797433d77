"""``torch.distributed`` over Holdfast: ``init_process_group("holdfast")`` is all that an unmodified DDP script needs.

Importing this registers the backend; torch does so by itself where Holdfast is installed (its entry
points), so that the word alone is enough. Workers are started by ``holdfast run -n 4 SCRIPT`` or by
``mpirun --with-ft ulfm -n 4 python SCRIPT``.

When a rank dies, sums inside ``DistributedDataParallel`` go on over the survivors, with the mean over the survivors. Any
other collective raises :class:`~holdfast.errors.RanksLost` once, at every survivor, and works again after that. Ranks
and sizes of groups stay what they were; :func:`alive` tells who is left.
"""

from __future__ import annotations

import os
from typing import Any


def autoload() -> None:
    """Be called by torch when it is imported, or looks for the backend; the import of this module did everything.

    It stands above the import of torch, which calls it before that import ends.
    """


import torch.distributed as dist  # noqa: E402

from holdfast.errors import RanksLost  # noqa: E402

__all__ = ["RanksLost", "alive"]

BACKEND = "holdfast"
"""The word for ``init_process_group``."""


def alive(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the global ranks of ``group`` (default: all) that are alive, as far as this worker knows, ascending.

    Raises:
        ValueError: if the group is not of this backend.
    """
    from holdfast.distributed.group import HoldfastGroup

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, HoldfastGroup):
        raise ValueError(f"alive() is for groups of the {BACKEND!r} backend, got {group}")
    return group.alive


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    from holdfast.distributed.group import create

    return create(options)


def _set_torchrun_variables() -> None:
    """Let ``env://`` work under a bare mpirun too, on one host; whatever is set already stays."""
    for name, source in (
        ("RANK", "OMPI_COMM_WORLD_RANK"),
        ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        if source in os.environ:
            os.environ.setdefault(name, os.environ[source])
    if os.environ.get("OMPI_COMM_WORLD_SIZE") == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""):
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")


if dist.is_available() and BACKEND not in dist.Backend.backend_list:
    _set_torchrun_variables()
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
