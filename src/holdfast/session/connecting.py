"""Connects this process to the other workers, and makes its part of the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.base.clock import SystemClock
from holdfast.base.options import is_set
from holdfast.base.torch_private import check_version
from holdfast.comm import Communicator, VirtualCommunicator, connect, device_of
from holdfast.comm.fabrics.registry import make_fabric
from holdfast.comm.launchers import MPI_INIT_S, chosen, under_mpirun
from holdfast.comm.waiting import waiting
from holdfast.config import Settings
from holdfast.engine import exits
from holdfast.engine.endpoint import endpoint_of
from holdfast.engine.injection import make_faults, reach_point
from holdfast.errors import ConfigError
from holdfast.faults import points
from holdfast.records.beacon import NoBeacon, connected_beacon, publish_connecting
from holdfast.records.files import FileRecorder
from holdfast.records.logger import Logger
from holdfast.records.paths import records_path
from holdfast.session.launched import LaunchReport, join_launched
from holdfast.state.context import CommittedState, JobContext, LiveSettings, LoopState
from holdfast.state.manager import CheckpointManager
from holdfast.state.order_choice import known_order


def check_device(device: torch.device, settings: Settings) -> None:
    """Check, before connecting, that a model can be trained on its device, over the configured fabric.

    Raises:
        ConfigError: if not.
    """
    device_of(device)
    fabric = make_fabric(chosen(settings.fabric))
    if device.type not in fabric.devices:
        raise ConfigError(
            f"the model is on {device}, but the fabric {fabric.name} trains models on {' or '.join(fabric.devices)}"
        )
    if settings.overlap_optimizer and device.type != "cpu" and not fabric.one_process:
        raise ConfigError(
            f"--overlap-optimizer needs a model in CPU memory, because it runs the optimizer in a thread; the model is on"
            f" {device}: leave the option out"
        )


def _mpi_limit_s(settings: Settings) -> float | None:
    """Return how long ``MPI_Init`` may wait for a process that has died; None if a launcher ends such waits, or none can be."""
    is_watched = bool(settings.run_dir) or not under_mpirun()
    limit_s = settings.start_timeout_s if is_set(settings, "start_timeout_s") else MPI_INIT_S
    return None if is_watched or not limit_s else limit_s


def connect_job(settings: Settings, given_comm: Communicator | None, at_exit: Callable[[], None]) -> JobContext:
    """Connect to the other workers, and return this worker's part of the job.

    Args:
        settings: The session's; those of the job also say where processes of another launcher have met.
        given_comm: A communicator that is connected already.
        at_exit: Checks at the end of the script that training is complete.

    Raises:
        ConfigError: if the fabric cannot work here.
        StoreLost: if the processes of another launcher do not all arrive.
    """
    joined = None
    if given_comm is None:
        settings, joined = join_launched(settings)
    publish_connecting()
    with exits.stacks_and_exit_after(_mpi_limit_s(settings)):
        comm = given_comm or connect(settings.fabric, endpoint_of(settings))
    job = _make_job(settings, comm)
    if joined is not None:
        job.log.subscribe(LaunchReport(joined))
        joined.end_in_order(at_exit)
    real = not isinstance(comm, VirtualCommunicator)
    if real and joined is None and not settings.run_dir:
        exits.end_job_on_errors(at_exit)
    if real:
        waiting.on_wait(job.beacon.publish_waits)
    if comm.members and job.is_lead:
        check_version()
    if settings.faults:
        points.arm(lambda name: reach_point(job, name))
    return job


def _make_job(settings: Settings, comm: Communicator) -> JobContext:
    rank, run_dir = comm.local_ranks[0], Path(settings.run_dir)
    clock = SystemClock(settings.origin_s)
    committed = CommittedState()
    log = Logger(clock, lambda: (comm.local_ranks[0], committed.step))
    if settings.run_dir:
        log.subscribe(FileRecorder(records_path(run_dir, str(rank))))
    return JobContext(
        settings=settings,
        comm=comm,
        clock=clock,
        log=log,
        beacon=connected_beacon(run_dir, rank) if settings.run_dir else NoBeacon(),
        faults=make_faults(settings, comm, committed, log),
        checkpoints=CheckpointManager(settings, background=not isinstance(comm, VirtualCommunicator)),
        first_members=comm.members or tuple(int(rank) for rank in settings.ranks.split(",")),
        committed=committed,
        loops=LoopState(settings.slices, known_order(settings)),
        live=LiveSettings.of(settings),
    )
