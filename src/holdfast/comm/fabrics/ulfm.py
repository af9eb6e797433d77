"""``ulfm``: Open MPI 5 with User-Level Failure Mitigation, started by mpirun."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
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


_FIRST_WITH_ULFM = 5
_INSTEAD = "run with --fabric gloo, which needs none, or pip install 'holdfast[mpi]'"
_ASK_S = 20.0


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
        return self.connect_messages(endpoint)

    def connect_messages(self, endpoint: Endpoint) -> MessageCommunicator:
        """Return the communicator of a process that mpirun started."""
        from holdfast.comm.claims import GenerationClaims
        from holdfast.comm.ulfm import UlfmCommunicator

        claims = GenerationClaims.under_mpirun(endpoint.run_dir, os.environ)
        return UlfmCommunicator(endpoint.ranks, endpoint.end_notes, claims)


def mpirun_command(num_workers: int, hosts: Sequence[str] | None = None) -> list[str]:
    """Return the mpirun command that starts ``num_workers`` processes; see :meth:`Fabric.launch_command`."""
    where = _HERE if hosts is None else (*_BY_SLOTS, *hosts)
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    mca = [word for name, value in _MCA for word in ("--mca", name, value)]
    return [find_mpirun(), *_MPIRUN, *where, *root, *mca, "-n", str(num_workers)]


def find_mpirun() -> str:
    """Return the ``mpirun`` of this Python environment, else that on ``PATH``.

    Raises:
        ConfigError: without it or mpi4py, and if that on ``PATH`` is none of Open MPI 5 or newer.
    """
    beside = Path(sys.executable).with_name("mpirun")
    if os.access(beside, os.X_OK):
        path: str | None = str(beside)
    else:
        path = shutil.which("mpirun")
        if path is not None and (wrong := _why_unusable(open_mpi_version(path))):
            raise ConfigError(f"{path} {wrong}: {_INSTEAD}")
    there = {"mpirun": path, "mpi4py": importlib.util.find_spec("mpi4py")}
    missing = [name for name, what in there.items() if what is None]
    if path is None or missing:
        raise ConfigError(f"MPI is not installed (no {' and no '.join(missing)}): {_INSTEAD}")
    return path


def _why_unusable(version: str) -> str:
    if not version:
        return "is not of Open MPI"
    major = version.partition(".")[0]
    too_old = major.isdecimal() and int(major) < _FIRST_WITH_ULFM
    return f"is of Open MPI {version}, which has no ULFM; it came with version {_FIRST_WITH_ULFM}" if too_old else ""


@functools.cache
def open_mpi_version(mpirun: str) -> str:
    """Return the version of Open MPI that an ``mpirun`` belongs to, "" if it is of another MPI or cannot be asked."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    name, _, version = done.stdout.partition("\n")[0].rpartition(" ")
    return version if name.endswith("(Open MPI)") else ""
