"""``ulfm``: Open MPI 5 with User-Level Failure Mitigation, started by mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.comm.fabrics.base import Endpoint, Fabric
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator, MessageCommunicator

_MPIRUN = ("--with-ft", "ulfm", "--bind-to", "none")
_HERE = ("--oversubscribe", "--mca", "btl", "self,sm")
"""On one machine workers communicate over shared memory; MPI's TCP transport would listen on all interfaces."""
_BY_SLOTS = ("--map-by", "slot:OVERSUBSCRIBE")
"""Allows more workers than cores. ``--oversubscribe`` would start all workers on the first of several machines."""
_MCA = (("coll", "^han"), ("mpi_yield_when_idle", "1"))
"""``coll/han`` is not fault tolerant. With more workers than cores, waiting processes must yield the CPU."""


class UlfmFabric(Fabric):
    """Real processes over MPI. Open MPI's runtime aborts the job when a node is lost."""

    name = "ulfm"
    connecting = "MPI_Init"
    spans_hosts = True

    def check_installed(self) -> None:
        """Check that mpirun and mpi4py are installed."""
        find_mpirun()

    def launch_command(self, workers: int, hosts: Sequence[str] | None = None) -> list[str]:
        """Return the mpirun command."""
        return mpirun_command(workers, hosts)

    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of a process that mpirun started."""
        from holdfast.comm.ulfm import UlfmCommunicator

        return UlfmCommunicator(endpoint.ranks, endpoint.core_of_end)

    def connect_messages(self, endpoint: Endpoint) -> MessageCommunicator:
        """Return the communicator of a process that mpirun started."""
        from holdfast.comm.ulfm import UlfmCommunicator

        return UlfmCommunicator(endpoint.ranks, endpoint.core_of_end)


def mpirun_command(num_workers: int, hosts: Sequence[str] | None = None) -> list[str]:
    """Return the mpirun command that starts ``num_workers`` processes; see :meth:`Fabric.launch_command`."""
    where = _HERE if hosts is None else (*_BY_SLOTS, *hosts)
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    mca = [word for name, value in _MCA for word in ("--mca", name, value)]
    return [find_mpirun(), *_MPIRUN, *where, *root, *mca, "-n", str(num_workers)]


def find_mpirun() -> str:
    """Return the ``mpirun`` of this Python environment, else that on ``PATH``; ``ConfigError`` without it or mpi4py."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    there = {"mpirun": found, "mpi4py": importlib.util.find_spec("mpi4py")}
    missing = [name for name, what in there.items() if what is None]
    if found is None or missing:
        raise ConfigError(
            f"MPI is not installed (no {' and no '.join(missing)}): run with --fabric gloo, which needs none, or "
            "pip install 'holdfast[mpi]'"
        )
    return found
