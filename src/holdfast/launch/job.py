"""What the launcher is asked to do, and what it answers."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from holdfast.comm.fabrics.base import Fabric
from holdfast.comm.fabrics.registry import DEFAULT, make_fabric
from holdfast.config import MOST_WORKERS, Settings
from holdfast.errors import ConfigError
from holdfast.launch.hostlist import Host
from holdfast.launch.stragglers import POLICIES
from holdfast.records.types import Record
from holdfast.recovery.registry import strategy_class

_MAX_RESTARTS = 3
_GRACE_S = 30.0
MAX_RESPAWNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script to run on some workers of this machine.

    Args:
        script: The file.
        args: What the script finds in ``sys.argv[1:]``.
        settings: For the workers; ``workers`` is how many there are. ``run_dir`` and ``origin_s`` are the launcher's.
        max_restarts: How often the whole job may be started again.
        stall_timeout_s: After this long in a sum with no sign of life from any worker the job counts as lost.
        grace_s: How long workers may take to finish their step and save when they are asked to stop.
        max_respawns: How many workers may be started in the place of those that died; 0 starts none.
        nnodes: Machines that take part, each with a launcher of its own and ``settings.workers`` workers.
        node_rank: Which of them this is.
        rdzv: The store where they meet; "" for a single node.
        rdzv_timeout_s: How long to wait for it, and for the launchers of the other nodes.
        node_timeout_s: A node that has not been heard of for so long is lost.
        hosts: Machines on which mpirun starts the workers; none: this one alone.
        launch_agent: Reaches them, as ``ssh`` does; "": ``ssh``.
        network: By which they talk, an interface or the addresses of a network; "": any.
        run_dir: A folder that they all see, for what workers tell the launcher; None: that of the checkpoints.
        stragglers: What to do about workers that are slower than the rest, one of :data:`~holdfast.launch.stragglers.POLICIES`.
        straggler_factor: How many times the median of the others makes a worker a straggler.
        mtbf_s: Kill random workers, on average one in so many seconds; 0 kills none.
        log_dir: Where each worker's output goes; None keeps it only until the run is over.
        report_dir: Where the report goes; None writes none.
        page: Draw the report's page, which takes a second or two.
    """

    script: Path
    args: tuple[str, ...] = ()
    settings: Settings
    max_restarts: int = _MAX_RESTARTS
    max_respawns: int = 0
    nnodes: int = 1
    node_rank: int = 0
    rdzv: str = ""
    rdzv_timeout_s: float = 300.0
    node_timeout_s: float = 10.0
    hosts: tuple[Host, ...] = ()
    launch_agent: str = ""
    network: str = ""
    run_dir: Path | None = None
    stragglers: str = "warn"
    straggler_factor: float = 2.0
    stall_timeout_s: float = 60.0
    mtbf_s: float = 0.0
    grace_s: float = _GRACE_S
    log_dir: Path | None = None
    report_dir: Path | None = None
    page: bool = True

    @property
    def is_virtual(self) -> bool:
        """Whether all workers live in one process."""
        return self.fabric.one_process

    @property
    def fabric(self) -> Fabric:
        """How workers are started, and how they communicate."""
        return make_fabric(self.settings.fabric or DEFAULT)

    @property
    def workers(self) -> int:
        """How many share the work, on all nodes."""
        return self.nnodes * self.settings.workers

    @property
    def ranks(self) -> tuple[int, ...]:
        """All workers and spares that the job begins with."""
        return tuple(range(self.workers + self.nnodes * self.settings.spares))

    def home(self, rank: int) -> int:
        """Return the node of a worker that the job begins with."""
        if rank < self.workers:
            return rank // self.settings.workers
        return (rank - self.workers) // self.settings.spares if rank in self.ranks else 0

    @property
    def host_list(self) -> str:
        """The hosts, as they are given."""
        return ",".join(map(str, self.hosts))

    @property
    def slices(self) -> int:
        """Slices of a mini-batch, the same for the whole job; 0 leaves it to the checkpoint that is resumed, or to a choice."""
        is_open = self.settings.resume or self.settings.auto_slices >= 0
        return self.settings.slices or (0 if is_open else self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        exit_code: 0 done, 1 failed, 2 wrong setting, 4 stopped with its state saved.
        message: One line that says why, "" if it is done.
        traceback: Of the first worker whose script raised, or "".
        mpirun_says: What mpirun printed, if no worker has said why the run failed, or "".
        report: As in ``report.json``.
        is_reported: It was written to the folder that the job has for it.
        records: Of all workers and of the launcher, in the order of time.
    """

    exit_code: int
    message: str
    traceback: str
    mpirun_says: str
    report: dict[str, Any]
    is_reported: bool
    records: tuple[Record, ...]


def check(job: Job) -> None:
    """Find out before anything is started whether the job can be.

    Raises:
        ConfigError: if not; the message says what to change.
    """
    settings = job.settings
    if not job.script.is_file():
        _refuse(f"there is no script {str(job.script)!r}")
    if settings.min_workers > job.workers:
        _refuse(f"--min-workers must be at most the number of workers ({job.workers}), got {settings.min_workers}")
    if settings.auto_slices >= max(1, job.workers) and not settings.resume:
        _refuse(
            f"--slices auto:F must leave somebody: F must be below the number of workers ({job.workers}), got {settings.auto_slices}"
        )
    if settings.resume and not settings.checkpoint_dir:
        _refuse("--resume needs --checkpoint-dir: where are the checkpoints to go on from?")
    _check_checkpoints(settings)
    strategy = strategy_class(settings.strategy)
    if strategy.needs_checkpoint and not settings.checkpoint_dir:
        _refuse(
            f"--strategy {settings.strategy} needs --checkpoint-dir: it goes back to the newest checkpoint after every failure"
        )
    if settings.reinit_from != "own" and not strategy.rebuilds:
        _refuse(f"--reinit-from {settings.reinit_from} needs --strategy reinit: the others build nothing again")
    if settings.reinit_from == "checkpoint" and not settings.checkpoint_dir:
        _refuse("--reinit-from checkpoint needs --checkpoint-dir: where are the checkpoints to go on from?")
    _check_amounts(job)
    check_plan(job)
    for folder, option in ((job.report_dir, "--report"), (job.log_dir, "--log-dir")):
        if folder is not None:
            _check_writable(folder, option)
    job.fabric.check_installed()


def _check_checkpoints(settings: Settings) -> None:
    place = settings.checkpoint_dir
    if not place:
        for given, option in (
            (settings.checkpoint_every or settings.checkpoint_auto, "--checkpoint-every"),
            (settings.keep_last, "--keep-last"),
        ):
            if given:
                _refuse(f"{option} needs --checkpoint-dir: where are the checkpoints to go?")
    if place and not _is_remote(place) and Path(_local(place)).exists() and not Path(_local(place)).is_dir():
        _refuse(f"--checkpoint-dir must be a folder, and {place} is a file")
    if settings.keep_every and not settings.keep_last:
        _refuse("--keep-every needs --keep-last: without it all checkpoints are kept")
    if settings.checkpoint_format == "hdf5" and importlib.util.find_spec("h5py") is None:
        _refuse("--checkpoint-format hdf5 needs h5py: pip install h5py, or choose another format")


def _is_remote(place: str) -> bool:
    """Return whether checkpoints are somewhere else than in a local folder."""
    return "://" in place and not place.startswith("file://")


def _local(place: str) -> str:
    return place.removeprefix("file://")


def _check_amounts(job: Job) -> None:
    in_all = job.nnodes * (job.settings.workers + job.settings.spares)
    if in_all > MOST_WORKERS:
        where = f"on all {job.nnodes} nodes together" if job.nnodes > 1 else "together"
        _refuse(f"workers and spares must be at most {MOST_WORKERS} {where}, got {in_all}")
    if job.max_restarts < 0:
        _refuse(f"--max-restarts must be at least 0, got {job.max_restarts}")
    if job.max_respawns < 0:
        _refuse(f"--max-respawns must be at least 0, got {job.max_respawns}")
    if not 0 < job.rdzv_timeout_s < math.inf:
        _refuse(f"--rdzv-timeout must be more than 0 seconds and finite, got {job.rdzv_timeout_s:g}")
    if job.stragglers not in POLICIES:
        _refuse(f"--stragglers must be one of {', '.join(POLICIES)}, got {job.stragglers!r}")
    if job.stragglers == "replace" and not (job.settings.spares or job.max_respawns):
        _refuse("--stragglers replace needs --spares or --respawn: who is to take the place of a slow worker?")
    if not 1 < job.straggler_factor < math.inf:
        _refuse(f"--straggler-factor must be more than 1 and finite, got {job.straggler_factor:g}")
    if job.max_respawns and not job.fabric.can_join:
        _refuse(
            f"--respawn needs --fabric gloo: the {job.settings.fabric} fabric cannot take in workers while it runs; --spares can wait there"
        )
    if not job.stall_timeout_s > 0:
        _refuse(f"--stall-timeout must be more than 0 seconds, got {job.stall_timeout_s:g}")
    if not 0 < job.grace_s < math.inf:
        _refuse(f"--grace must be more than 0 seconds and finite, got {job.grace_s:g}")
    if job.mtbf_s and job.is_virtual:
        _refuse(
            f"--mtbf kills processes, and with --fabric {job.settings.fabric} all workers are one; use --inject, or --fabric ulfm"
        )
    if not 0 <= job.mtbf_s < math.inf:
        _refuse(f"--mtbf must be more than 0 seconds and finite, got {job.mtbf_s:g}")


def check_plan(job: Job) -> None:
    """Look whether the fault plan fits the workers.

    Raises:
        ConfigError: if not.
    """
    if job.settings.faults:
        from holdfast.faults.plan import FaultPlan

        workers = range(len(job.ranks) + job.max_respawns)
        FaultPlan.from_json(job.settings.faults).check(workers, nodes=job.nnodes)


def _check_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = f"{option} {folder} cannot be written: {error.strerror}"
        raise ConfigError(msg) from error


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


# ---------------------------------------------------------------------------------------------
# The command line that says it again

OPTIONS = (
    ("--fabric", "fabric"),
    ("--spares", "spares"),
    ("--strategy", "strategy"),
    ("--reinit-from", "reinit_from"),
    ("--order", "order"),
    ("--split", "split"),
    ("--batch", "batch"),
    ("--rescale", "rescale"),
    ("--update", "update"),
    ("--guard", "guard"),
    ("--guard-sums", "guard_sums"),
    ("--kinds", "kinds"),
    ("--mirror", "mirror"),
    ("--mirror-every", "mirror_every"),
    ("--mirror-fraction", "mirror_fraction"),
    ("--mirror-choice", "mirror_choice"),
    ("--mirror-distance", "mirror_distance"),
    ("--mirror-predictor", "mirror_predictor"),
    ("--mirror-codec", "mirror_codec"),
    ("--mirror-optimizer", "mirror_optimizer"),
    ("--min-workers", "min_workers"),
    ("--seed", "seed"),
    ("--slices", "slices"),
    ("--checkpoint-dir", "checkpoint_dir"),
    ("--checkpoint-every", "checkpoint_every"),
    ("--checkpoint-format", "checkpoint_format"),
    ("--keep-last", "keep_last"),
    ("--keep-every", "keep_every"),
    ("--expected-mtbf", "mtbf_s"),
    ("--hang-timeout", "hang_timeout_s"),
    ("--start-timeout", "start_timeout_s"),
    ("--stop-after", "stop_after"),
)
_JOB_OPTIONS = (
    ("--max-restarts", "max_restarts"),
    ("--nnodes", "nnodes"),
    ("--node-rank", "node_rank"),
    ("--rdzv", "rdzv"),
    ("--rdzv-timeout", "rdzv_timeout_s"),
    ("--node-timeout", "node_timeout_s"),
    ("--hosts", "host_list"),
    ("--launch-agent", "launch_agent"),
    ("--network", "network"),
    ("--run-dir", "run_dir"),
    ("--stragglers", "stragglers"),
    ("--straggler-factor", "straggler_factor"),
    ("--stall-timeout", "stall_timeout_s"),
    ("--grace", "grace_s"),
    ("--mtbf", "mtbf_s"),
    ("--log-dir", "log_dir"),
    ("--report", "report_dir"),
)


def command_line(job: Job, *, faults: Sequence[str] = ()) -> str:
    """Return the command that runs the job, with every setting that is not the default; the secret of the nodes stays out.

    Args:
        job: What to run.
        faults: Specs of the faults to inject.
    """
    settings = job.settings
    words = ["holdfast", "run", "-n", str(settings.workers), *_said(settings, OPTIONS, Settings(fabric="ulfm"))]
    words += ["--checkpoint-every", "auto"] if settings.checkpoint_auto else []
    words += ["--slices", settings.auto_text] if settings.auto_text else []
    words += [] if settings.certificate else ["--no-certificate"]
    words += ["--resume"] if settings.resume else []
    words += ["--respawn"] if job.max_respawns else []
    words += ["--max-respawns", str(job.max_respawns)] if job.max_respawns not in (0, MAX_RESPAWNS) else []
    words += _said(job, _JOB_OPTIONS, Job(script=job.script, settings=settings))
    for fault in faults:
        words += ["--inject", fault]
    return shlex.join([*words, str(job.script), *job.args])


def _said(given: object, options: Sequence[tuple[str, str]], usual: object) -> list[str]:
    """Return the options of what is not as usual, each with its value; what is wanted or not has none."""
    values = [(option, getattr(given, name), getattr(usual, name)) for option, name in options]
    return [
        word
        for option, value, default in values
        if value != default
        for word in (option, *([] if value is True else [f"{value:.12g}" if isinstance(value, float) else str(value)]))
    ]


def resume_command(job: Job, workers: int, checkpoint_dir: str) -> str:
    """Return the command that goes on from ``checkpoint_dir``, the same on every node.

    Args:
        job: What was run.
        workers: How many are left, spares among them; the job may need more.
        checkpoint_dir: Where the state is.
    """
    if job.hosts:  # all workers end with a host that is lost, and those that are left have room again
        workers = min(len(job.ranks), sum(host.slots for host in job.hosts))
    share = max(min(workers, job.workers) if job.settings.spares else workers, job.settings.min_workers)
    settings = dataclasses.replace(
        job.settings,
        workers=math.ceil(share / job.nnodes),
        slices=job.slices,
        auto_slices=-1,
        checkpoint_dir=checkpoint_dir,
        stop_after=-1,
        resume=True,
    )
    return command_line(dataclasses.replace(job, settings=settings, mtbf_s=0.0))
