"""The job that the launcher runs, its options, and its outcome."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.base.options import option
from holdfast.comm.fabrics.base import Fabric
from holdfast.comm.fabrics.registry import DEFAULT, make_fabric
from holdfast.config import MOST_WORKERS, Settings
from holdfast.errors import ConfigError
from holdfast.launch.target import MODULE
from holdfast.setting_choices import POLICIES

if TYPE_CHECKING:
    from holdfast.launch.fleet.hostlist import Host
    from holdfast.records.types import Record

MAX_RESPAWNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script to run on workers of this machine or of several, with the options that only the launcher needs.

    Args:
        script: The file.
        args: ``sys.argv[1:]`` of the script.
        module: The name under which the file is run as a module, as by ``python -m``; "" for a script.
        settings: Settings of the workers; ``workers`` is their number. The launcher sets ``run_dir`` and ``origin_s``.
        is_managed: Whether another process than a launcher, such as a driver of Ray, hosts the store of a ``holdfast://``
            rendezvous, decides with which nodes the job begins, and starts lost nodes again.
    """

    script: Path
    args: tuple[str, ...] = ()
    module: str = ""
    settings: Settings
    is_managed: bool = False
    max_restarts: int = option(
        3, help="Maximum number of restarts of the whole job.", group="Recovery", metavar="R", has_default=True
    )
    max_no_progress: int = option(
        3,
        help="Give up after this many restarts without a new committed step; 0: never.",
        manual="give up after this many restarts in a row without a new committed step, with the exit code of `--no-requeue-code`, or 1 if no worker could be connected; 0: never",
        group="Recovery",
        metavar="N",
        has_default=True,
    )
    gpus: str = option(
        "auto",
        help="GPUs of a node that its workers use: all, none, or the first N.",
        manual="GPUs of a node that its workers use: all, none, or the first N of them. Each worker sees one: [gpus.md](../how-to/gpus.md)",
        group="Workers",
        metavar="auto|none|N",
        has_default=True,
    )
    max_respawns: int = option(
        0,
        help="Maximum number of replacement workers.",
        manual="maximum number of replacement workers, with `--respawn`",
        usual="16",
        group="Spare and replacement workers",
        metavar="R",
        most=MOST_WORKERS,
    )
    nnodes: int = option(
        1,
        help="Nodes, each with a launcher of its own; --fabric gloo.",
        manual="nodes, each with a launcher of its own and `-n` workers; `--fabric gloo` only: [several-nodes.md](../how-to/several-nodes.md)",
        group="Multiple nodes with Gloo",
        is_basic=True,
        metavar="N",
        most=MOST_WORKERS,
        least_given=1,
        has_default=True,
    )
    node_rank: int = option(
        0,
        help="Rank of this node, from 0.",
        usual="0",
        group="Multiple nodes with Gloo",
        is_basic=True,
        metavar="R",
        has_default=True,
    )
    rdzv: str = option(
        "",
        help="Rendezvous: holdfast://HOST:PORT or etcd://HOST:PORT/JOB.",
        manual="rendezvous: `holdfast://HOST:PORT`, hosted by node 0; `holdfast://HOST:PORT,HOST:PORT,HOST:PORT`, hosted by the first nodes, of which any may be lost; or `etcd://HOST:PORT[,HOST:PORT...]/JOB`",
        group="Multiple nodes with Gloo",
        is_basic=True,
        metavar="URL",
    )
    rdzv_timeout_s: float = option(
        300.0,
        help="How long to wait for the rendezvous.",
        manual="how long to wait for the store and for the other nodes",
        group="Multiple nodes with Gloo",
        has_default=True,
    )
    node_timeout_s: float = option(
        10.0,
        help="A node without a heartbeat for this long is lost.",
        manual="a node without a heartbeat for this long is lost, with its workers",
        group="Multiple nodes with Gloo",
        has_default=True,
    )
    health_check: str = option(
        "",
        help="A command for the shell that ends with 0 if this node is fit to join.",
        manual="a command for the shell that each node runs before it joins. A node on which it does not end with 0 stays out: [check-nodes.md](../how-to/check-nodes.md)",
        usual="none",
        group="Multiple nodes with Gloo",
        metavar="COMMAND",
        has_default=True,
    )
    hosts: tuple[Host, ...] = option(
        (),
        help="Hosts on which mpirun starts workers; --fabric ulfm.",
        manual="hosts on which mpirun starts workers, with N slots each; `--fabric ulfm` only: [open-mpi.md](../how-to/open-mpi.md)",
        usual="this machine",
        group="Multiple nodes with Open MPI",
        is_basic=True,
        metavar="HOST:N,...|FILE|slurm",
        kind=str,
    )
    launch_agent: str = option(
        "",
        help="Remote shell, called as CMD HOST COMMAND.",
        manual="remote shell, called as `CMD HOST COMMAND`",
        usual="`ssh`",
        group="Multiple nodes with Open MPI",
        metavar="CMD",
    )
    network: str = option(
        "",
        help="Network interface or CIDR that workers use to communicate.",
        usual="any",
        group="Multiple nodes with Open MPI",
        metavar="NET",
    )
    run_dir: Path | None = option(
        None,
        help="Directory that all hosts share, for the time of the run.",
        usual="that of `--checkpoint-dir`",
        group="Multiple nodes with Open MPI",
        kind=Path,
    )
    stragglers: str = option(
        "warn",
        help="Response to slow workers.",
        manual="response to a worker that has been slower than the others for 20 steps, at most once in 30 s: log it; assign it fewer slices (with `--split even`, a smaller share); or stop it, so that a spare or new worker replaces it. `replace` needs `--spares` or `--respawn`, and only warns when none is left. `rebalance` needs a single launcher (`--nnodes 1`), which knows the speed of all workers",
        group="Failure detection",
        choices=POLICIES,
        has_default=True,
    )
    straggler_factor: float = option(
        2.0,
        help="Slow: X times the median time per slice of the other workers.",
        group="Failure detection",
        metavar="X",
        has_default=True,
    )
    stall_timeout_s: float = option(
        60.0,
        help="Restart the job if all workers wait for each other for this long.",
        manual="restart the job if all live workers have waited for each other for this long without a heartbeat, or have recovered repeatedly without progress",
        group="Failure detection",
        has_default=True,
    )
    preload: bool = option(
        True,
        help="Import torch once, and fork the workers from there.",
        manual="import torch once on each node, and fork the workers from there; without it each worker imports torch. It is not used for a script that sets a variable which torch reads while it is imported, such as `OMP_NUM_THREADS`",
        usual="`--preload`",
        group="Workers",
        flags=("--preload/--no-preload",),
        has_default=True,
    )
    mtbf_s: float = option(
        0.0,
        help="Chaos mode: kill random workers, with this mean time between kills.",
        manual="chaos mode: kill a random worker at exponentially distributed intervals with this mean; the last worker is spared",
        group="Fault injection",
    )
    grace_s: float = option(
        30.0,
        help="Time to finish the step and save after SIGTERM or SIGINT.",
        group="Resume and stop",
        has_default=True,
    )
    no_requeue_code: int = option(
        93,
        help="Exit code for a failure that would happen again: a bug, bad samples, no progress.",
        manual="exit code for a failure that would happen again, so that the job should not be requeued: an exception of the script, samples that kill workers, no progress. 1, or from 5 to 125: [exit-codes.md](exit-codes.md)",
        group="Resume and stop",
        metavar="CODE",
        has_default=True,
    )
    left_code: int = option(
        0,
        help="Exit code of a node that left on SIGTERM while the job continues.",
        manual="exit code of a node that left on SIGTERM while the job continues on the others. 0, or from 4 to 125; in an Indexed Job of Kubernetes it is 4, since 0 would say that the index is complete: [kubernetes.md](../how-to/kubernetes.md)",
        group="Resume and stop",
        metavar="CODE",
        has_default=True,
    )
    log_dir: Path | None = option(
        None,
        help="Write each worker's output to a file in this directory.",
        usual="the report directory",
        group="Output",
        kind=Path,
    )
    report_dir: Path | None = option(
        None,
        help="Write report.json, events.jsonl and index.html to this directory.",
        manual="write `report.json`, `events.jsonl` and `index.html` to this directory",
        group="Output",
        is_basic=True,
        flags=("--report",),
        kind=Path,
    )
    events_max: str = option(
        "64MiB",
        help="Size after which events.jsonl is renamed to events-000001.jsonl, and so on; off: never.",
        manual="size after which `events.jsonl` is renamed to `events-000001.jsonl`, then `events-000002.jsonl`, and a new one begins: kB, MB, GB, KiB, MiB or GiB. `off`: never. All files are kept: [report.md](report.md#eventsjsonl)",
        group="Output",
        metavar="SIZE|off",
        has_default=True,
    )
    page: bool = option(
        True,
        help="Also write index.html.",
        manual="also write `index.html`, which takes a second or two; `holdfast report DIR` writes it later",
        usual="`--page`",
        group="Output",
        flags=("--page/--no-page",),
        has_default=True,
    )

    debug_bundles: str = option(
        "",
        help="Write a debug bundle here when workers are lost or hang; off: not even the stack of a hung worker.",
        manual="write a debug bundle to this directory when workers are lost or hang, at most five in a run. `off`: not even the stack of a worker that hangs is taken before it is killed: [debug.md](../how-to/debug.md)",
        usual="the stacks of workers that hang",
        group="Output",
        metavar="DIR|off",
        kind=str,
    )

    metrics_port: str = option(
        "",
        help="Serve metrics to Prometheus on this port, of this machine only unless HOST is given.",
        manual="serve metrics to Prometheus at `http://HOST:PORT/metrics`, on the first node; without HOST only to this machine, with port 0 on a free port: [monitor-with-prometheus.md](../how-to/monitor-with-prometheus.md)",
        group="Monitoring",
        metavar="[HOST:]PORT",
        kind=str,
    )
    metrics_file: Path | None = option(
        None,
        help="Write metrics to this file, NAME.prom, for node-exporter's textfile collector.",
        manual="write metrics to this file every 5 s, on the first node, for the textfile collector of node-exporter; its name must end in `.prom`",
        group="Monitoring",
        metavar="FILE",
        kind=Path,
    )
    log_to: tuple[str, ...] = option(
        (),
        help="Log each step to tensorboard:DIR, wandb[:PROJECT] or mlflow[:URI]; trace recoveries to otel[:ENDPOINT].",
        manual="log each step once to `tensorboard:DIR`, `wandb[:PROJECT]` or `mlflow[:URI]`, or send a span for each recovery to `otel[:ENDPOINT]`, on the first node; repeatable: [log-experiments.md](../how-to/log-experiments.md)",
        group="Monitoring",
        flags=("--log-to",),
        metavar="TARGET",
        kind=list[str],
    )

    dashboard: str = option(
        "",
        help="Serve a page about the running job on this port, of this machine only unless HOST is given.",
        manual="serve a page about the running job at `http://HOST:PORT/`, on the first node; without HOST only to this machine, with port 0 on a free port. The URL, with the token that actions need, is printed once: [dashboard.md](../how-to/dashboard.md)",
        group="Monitoring",
        metavar="[HOST:]PORT",
        kind=str,
    )

    @property
    def words(self) -> tuple[str, ...]:
        """The script or module and its arguments, as on a command line."""
        return (*((MODULE, self.module) if self.module else (str(self.script),)), *self.args)

    @property
    def is_virtual(self) -> bool:
        """Whether all workers are in one process."""
        return self.fabric.one_process

    @property
    def fabric(self) -> Fabric:
        """The fabric, which starts the workers and connects them."""
        return make_fabric(self.settings.fabric or DEFAULT)

    @property
    def workers(self) -> int:
        """Number of workers that compute, over all nodes."""
        return self.nnodes * self.settings.workers

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all workers and spares that the job begins with."""
        return tuple(range(self.size))

    @property
    def size(self) -> int:
        """Number of workers and spares that the job begins with, over all nodes."""
        return self.nnodes * (self.settings.workers + self.settings.spares)

    @property
    def slots(self) -> int:
        """Workers that may run on the hosts."""
        return sum(host.slots for host in self.hosts)

    def home(self, rank: int) -> int:
        """Return the node of a worker that the job begins with."""
        if rank < self.workers:
            return rank // self.settings.workers
        return (rank - self.workers) // self.settings.spares if rank in self.ranks else 0

    @property
    def slices(self) -> int:
        """Slices per mini-batch, fixed for the job; 0 if the resumed checkpoint or ``auto_slices`` determines them."""
        is_open = self.settings.resume or self.settings.auto_slices >= 0
        return self.settings.slices or (0 if is_open else self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Outcome of a run."""

    exit_code: int  # 0 done, 1 failed, 2 wrong setting, 4 stopped with its state saved, 93 failed and would again
    message: str  # one line that gives the reason, "" if the run is done
    traceback: str  # traceback of the first worker whose script raised, or ""
    mpirun_output: str  # output of mpirun, if no worker recorded why the run failed, or ""
    report: dict[str, Any]  # content of ``report.json``
    is_reported: bool  # whether the report was written to the job's report directory
    records: tuple[Record, ...]  # records of all workers and of the launcher, ordered by time
    is_shown: bool = True  # whether this launcher shows the summary; not if another one's output stands beside it


def is_remote(place: str) -> bool:
    """Return whether checkpoints are in remote storage, not in a local directory."""
    return "://" in place and not place.startswith("file://")


def check_writable(folder: Path, option: str, *, mode: int = 0o777) -> None:
    """Raise a ConfigError that begins with ``option``, if no file can be written in ``folder``, made with ``mode``."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be written: {error.strerror}") from error
