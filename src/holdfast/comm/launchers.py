"""Detects from the environment that another launcher (torchrun, srun, ...) started this process as one of several.

Where the environment says which one, and where all meet, they join each other: :mod:`holdfast.comm.joining`. Otherwise
this process is refused, because each would train alone. Nothing here imports torch or MPI.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.base.phases import Phase
from holdfast.base.slurm import number, read_step
from holdfast.errors import ConfigError

_SIZES = {
    "WORLD_SIZE": "",  # set by torchrun, and by Ray Train, Accelerate, DeepSpeed and others
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script, a single process
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "an MPI launcher",
    "MV2_COMM_WORLD_SIZE": "an MPI launcher",
    "FLUX_JOB_SIZE": "Flux",
    "HOROVOD_SIZE": "horovodrun",
    "PET_NNODES": "Kubeflow",  # a range MIN:MAX for an elastic job
}
"""Variables with the number of processes, and their launcher."""

_RANKS = {
    "WORLD_SIZE": "RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "HOROVOD_SIZE": "HOROVOD_RANK",
}
"""Variables with the rank of a process among them."""
_LOCAL_SIZES = {
    "WORLD_SIZE": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE": "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_SIZE",
    "HOROVOD_SIZE": "HOROVOD_LOCAL_SIZE",
}
"""Variables with the number of processes on this machine."""
_WITHOUT_SIZE = {"PMIX_RANK": "a PMIx launcher", "RAY_JOB_ID": "Ray"}
"""Variables that launchers set in every process that they start, without the number of processes."""

_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "RAY_JOB_ID", "FLUX_JOB_ID")
"""Variables that identify a job, the same in all its processes."""
_FIRST_PORT, _PORTS = 20000, 12000

MPI_INIT_S = Phase.MPI_GROUP.value.fixed_s
"""How long ``MPI_Init`` may take where no launcher of Holdfast watches."""
ON_DEATH = "HOLDFAST_ON_DEATH"
"""What the processes of another launcher do when one of them dies: ``continue`` or ``end``."""
_ON_DEATH = ("continue", "end")
_ENDS_ALL = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "KUBERNETES_SERVICE_HOST")
"""Variables of launchers that set ``WORLD_SIZE``, and end or restart processes when one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedGroup:
    """The processes that another launcher started, as this one of them knows them.

    Args:
        launcher: Its name.
        rank: This process.
        size: Number of processes.
        is_local: Whether all are on this machine.
        host: Where they meet: a TCPStore of torch.
        port: Its port.
        has_store: Whether the launcher hosts that store, and keeps it over restarts; otherwise rank 0 hosts it.
        restarts_all: Whether the launcher starts all processes again when one has failed.
        leaves_survivors: Whether the launcher leaves the other processes alone when one has failed, so that they can
            continue.
        attempt: Restarts so far.
        job: Tells it from other groups that may meet at the same place; "" if the environment does not.
    """

    launcher: str
    rank: int
    size: int
    is_local: bool
    host: str
    port: int
    has_store: bool = False
    restarts_all: bool = False
    leaves_survivors: bool = False
    attempt: int = 0
    job: str = ""


def under_mpirun() -> bool:
    """Return whether Open MPI's mpirun started this process."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ


def has_ulfm() -> bool:
    """Return whether mpirun was started with fault tolerance."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI's spelling


def chosen(fabric: str) -> str:
    """Return the fabric of this process: the requested one, or the one that works under its launcher.

    That is ``ulfm`` under mpirun, if it has fault tolerance; ``gloo`` among the processes of another launcher; and
    ``virtual`` elsewhere.
    """
    if fabric:
        return fabric
    if under_mpirun() and has_ulfm():
        return "ulfm"
    if own_group() is not None:
        return "gloo"
    return "ulfm" if under_mpirun() else "virtual"


_own: list[LaunchedGroup] = []


def own_group() -> LaunchedGroup | None:
    """Return the :func:`launched_group` of this process, also if a framework has changed its environment since."""
    if not _own and (group := launched_group(os.environ)) is not None:
        _own.append(group)
    return _own[0] if _own else None


def launched_group(env: Mapping[str, str]) -> LaunchedGroup | None:
    """Return the processes that this one can join; None if it is alone, or the environment does not say enough."""
    counted = _several(env)
    return _group(env, counted) if counted in _RANKS else None


def sole_process(env: Mapping[str, str]) -> LaunchedGroup | None:
    """Return this process as a group, if torchrun started it alone, perhaps after it had started several."""
    group = _group(env, "WORLD_SIZE") if _size(env, "WORLD_SIZE") == 1 else None
    return group if group is not None and group.restarts_all and group.has_store else None


def _group(env: Mapping[str, str], counted: str) -> LaunchedGroup | None:
    size, rank = _size(env, counted), number(env, _RANKS[counted])
    where = _rendezvous(env, counted, size)
    if rank is None or rank >= size or where is None:
        return None
    is_torchrun = "TORCHELASTIC_RUN_ID" in env
    return LaunchedGroup(
        launcher=_launcher(env, counted) or "another launcher",
        rank=rank,
        size=size,
        is_local=_is_local(env, counted, size),
        host=where[0],
        port=where[1],
        has_store=counted == "WORLD_SIZE" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts_all=is_torchrun and counted == "WORLD_SIZE",
        leaves_survivors=leaves_survivors(env, counted),
        attempt=(number(env, "TORCHELASTIC_RESTART_COUNT") or 0) if is_torchrun else 0,
        job=" ".join(env[name] for name in _JOBS if name in env),
    )


def leaves_survivors(env: Mapping[str, str], counted: str) -> bool:
    """Return whether the launcher leaves the other processes alone when one has failed, as far as the environment says.

    ``HOLDFAST_ON_DEATH`` decides, if it is set. Otherwise torchrun, Ray Train and MPI launchers end all processes; ``srun``
    does not, unless it is told to; and nothing ends processes that were started one by one. A pod that has failed is
    started again and waits for all others, so these must end, too.

    Args:
        env: The environment.
        counted: The variable with the number of processes.

    Raises:
        ConfigError: if ``HOLDFAST_ON_DEATH`` has another value.
    """
    setting = env.get(ON_DEATH, "")
    if setting not in ("", *_ON_DEATH):
        raise ConfigError(f"{ON_DEATH} must be {' or '.join(_ON_DEATH)}, got {setting!r}")
    if setting:
        return setting == _ON_DEATH[0]
    if counted == "SLURM_STEP_NUM_TASKS":
        return env.get("SLURM_KILL_BAD_EXIT", "0") == "0"
    return counted == "WORLD_SIZE" and not any(name in env for name in _ENDS_ALL)


def _is_local(env: Mapping[str, str], counted: str, size: int) -> bool:
    if counted == "SLURM_STEP_NUM_TASKS":
        step = read_step(env)
        return step is not None and step.num_nodes == 1
    return number(env, _LOCAL_SIZES.get(counted, "")) == size


def _rendezvous(env: Mapping[str, str], counted: str, size: int) -> tuple[str, int] | None:
    """Return host and port of the store where all processes meet, None if the environment does not say."""
    host, port = env.get("MASTER_ADDR", ""), number(env, "MASTER_PORT")
    if counted == "SLURM_STEP_NUM_TASKS":
        step = read_step(env)
        if step is not None:
            host, port = host or step.first_host, port or step.port
    elif counted == "OMPI_COMM_WORLD_SIZE" and _is_local(env, counted, size) and (job := env.get("PMIX_NAMESPACE")):
        host, port = "127.0.0.1", _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    return (host, port) if host and port else None


def others_started(env: Mapping[str, str]) -> str:
    """Return the error message if a launcher started this process as one of several, else ""."""
    saw = _several(env)
    if not saw and not any(_size(env, name) for name in _SIZES):
        saw = next((name for name in _WITHOUT_SIZE if name in env), "")
    if not saw:
        return ""
    size, launcher = _size(env, saw), _launcher(env, saw)
    what = "is" if size else "may be"
    meet = ", or set MASTER_ADDR and MASTER_PORT to where rank 0 listens" if saw in _RANKS else ""
    return (
        f"{saw}={env[saw]}{f' ({launcher})' if launcher else ''} says that this process {what} one of several, "
        "and each would train alone: "
        f'start {_instead(env, saw, size)}{meet}, or let it train alone with fabric="virtual" or HOLDFAST_FABRIC=virtual'
    )


def _several(env: Mapping[str, str]) -> str:
    """Return the variable that says that there are several processes, or ""."""
    variables = [name for name in _SIZES if _size(env, name) > 1]
    if "OMPI_COMM_WORLD_SIZE" in variables and "TORCHELASTIC_RUN_ID" not in env:
        return "OMPI_COMM_WORLD_SIZE"  # the backend for torch.distributed adds torch's variables
    return next(iter(variables), "")


def _size(env: Mapping[str, str], name: str) -> int:
    """Return the largest number of processes that a variable allows, 0 if it is not set or holds no number."""
    if name not in _SIZES:
        return 0
    if name == "SLURM_STEP_NUM_TASKS" and number(env, name) is not None:
        step = read_step(env)
        return 1 if step is None else step.num_tasks
    return number({name: env.get(name, "").rpartition(":")[2]}, name) or 0


def _launcher(env: Mapping[str, str], saw: str) -> str:
    if saw in _WITHOUT_SIZE:
        return _WITHOUT_SIZE[saw]
    if saw != "WORLD_SIZE":
        return _SIZES[saw]
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "Ray" if "RAY_JOB_ID" in env else ""


def _instead(env: Mapping[str, str], saw: str, size: int) -> str:
    """Return the command that starts the same number of workers."""
    if saw == "SLURM_STEP_NUM_TASKS":
        return "`holdfast run --hosts slurm SCRIPT` in the allocation, without srun"
    local_size = number(env, "LOCAL_WORLD_SIZE") or 0 if saw == "WORLD_SIZE" else 0
    nodes = size if saw == "PET_NNODES" else size // local_size if local_size else 1
    if nodes > 1:
        return f"`holdfast run --nnodes {nodes} -n {local_size or 'N'} ... SCRIPT` on each machine (docs/how-to/several-nodes.md)"
    return f"`holdfast run -n {size or 'N'} SCRIPT`"
