"""The rules between the options of a job, and the checks of what it needs here before it starts."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from holdfast.base.rules import Rule, check_rules
from holdfast.config import MOST_WORKERS
from holdfast.errors import ConfigError
from holdfast.launch.fleet.mpi_hosts import check_hosts
from holdfast.launch.fleet.rendezvous import forms_of_urls, hub_places, is_place, split_place
from holdfast.launch.job import Job, check_writable, is_remote
from holdfast.recovery.registry import strategy_class
from holdfast.recovery.strategy import Strategy
from holdfast.setting_choices import POLICIES

_NEVER = "off"
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9} | {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_in_bytes(text: str) -> int:
    """Return the size after which a file is full, as ``--events-max`` gives it; 0: never.

    Raises:
        ConfigError: if it is not ``off``, or a whole number above 0 with a unit.
    """
    if text == _NEVER:
        return 0
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit)
    if not (unit and number.isascii() and number.isdecimal() and int(number)):
        raise ConfigError(
            f"--events-max must be {_NEVER}, or a whole number above 0 with one of {', '.join(_UNITS)}, got {text!r}"
        )
    return int(number) * _UNITS[unit]


_LOOPBACK = ("127.0.0.1", "localhost", "::1")

# -- nodes


def _meets(job: Job) -> bool:
    """Return whether launchers meet at a rendezvous."""
    return job.nnodes > 1 or bool(job.rdzv)


def _malformed_url(job: Job) -> str | None:
    """Return the URL of the rendezvous, or the address in it, that has no known form; None if all have one."""
    if not job.rdzv or job.rdzv.startswith("etcd://"):
        return None
    places = hub_places(job.rdzv)
    return next((place for place in places if not is_place(place)), None) if places else job.rdzv


def _is_open_to_others(places: Sequence[str]) -> bool:
    return not {split_place(place)[0] for place in places}.issubset(_LOOPBACK)


NODE_RULES = (
    Rule(("nnodes",), lambda it: it.nnodes < 1, "--nnodes must be at least 1, got {it.nnodes}"),
    Rule(
        ("node_timeout_s",),
        lambda it: not 0.5 <= it.node_timeout_s <= 3600,
        "--node-timeout must be between 0.5 and 3600 seconds, got {it.node_timeout_s:g}",
    ),
    Rule(
        ("node_rank", "nnodes", "rdzv"),
        lambda it: it.node_rank and not _meets(it),
        "--node-rank must be 0 with one node, got {it.node_rank}",
    ),
    Rule(
        ("nnodes", "rdzv", "fabric"),
        lambda it: _meets(it) and not it.fabric.survives_node_loss,
        "--nnodes and --rdzv need --fabric gloo, got {it.settings.fabric}; with ulfm, use --hosts, see"
        " docs/how-to/several-nodes.md",
    ),
    Rule(
        ("stragglers", "nnodes"),
        lambda it: it.nnodes > 1 and it.stragglers == "rebalance",
        "--stragglers rebalance works on one node only: a launcher knows the speed of its own workers; use warn or"
        " replace",
    ),
    Rule(
        ("node_rank", "nnodes"),
        lambda it: _meets(it) and not 0 <= it.node_rank < it.nnodes,
        lambda it: f"--node-rank must be from 0 to {it.nnodes - 1} (--nnodes {it.nnodes}), got {it.node_rank}",
    ),
    Rule(
        ("nnodes", "rdzv"),
        lambda it: it.nnodes > 1 and not it.rdzv,
        "--nnodes needs --rdzv, for instance holdfast://HOST:29400, the address of the first node",
    ),
    Rule(("rdzv",), lambda it: _malformed_url(it) is not None, lambda it: forms_of_urls(_malformed_url(it))),
    Rule(
        ("rdzv", "nnodes"),
        lambda it: len(places := hub_places(it.rdzv)) > it.nnodes or len(set(places)) < len(places),
        "--rdzv must name the first nodes, each once, and at most as many as --nnodes ({it.nnodes}), got {it.rdzv!r}",
    ),
    Rule(
        ("rdzv",),
        lambda it: len(hub_places(it.rdzv)) == 2,
        "--rdzv must name one node, or at least three, got {it.rdzv!r}: of two, the loss of one may leave no majority",
    ),
    Rule(
        ("rdzv", "token"),
        lambda it: _is_open_to_others(hub_places(it.rdzv)) and not it.settings.token,
        "--rdzv on another machine needs a secret that all nodes share: --rdzv-token, or HOLDFAST_TOKEN",
    ),
)
"""Of several launchers, as far as it can be said on any machine."""

# -- one launcher


def _strategy(job: Job) -> type[Strategy]:
    return strategy_class(job.settings.strategy)


def _no_script(job: Job) -> str:
    hint = "" if job.script.suffix else "; a command must be python SCRIPT or python -m MODULE"
    return f"there is no script {str(job.script)!r}{hint}"


def _saves_to_a_file(job: Job) -> bool:
    place = job.settings.checkpoint_dir
    local = Path(place.removeprefix("file://"))
    return bool(place) and not is_remote(place) and local.exists() and not local.is_dir()


_CHECKPOINT_RULES = (
    Rule(
        ("resume", "checkpoint_dir"),
        lambda it: it.settings.resume and not it.settings.checkpoint_dir,
        "--resume needs --checkpoint-dir, the directory of the checkpoints to resume from",
    ),
    Rule(
        ("checkpoint_every", "checkpoint_auto", "checkpoint_dir"),
        lambda it: (it.settings.checkpoint_every or it.settings.checkpoint_auto) and not it.settings.checkpoint_dir,
        "--checkpoint-every needs --checkpoint-dir, the directory for the checkpoints",
    ),
    Rule(
        ("keep_last", "checkpoint_dir"),
        lambda it: it.settings.keep_last and not it.settings.checkpoint_dir,
        "--keep-last needs --checkpoint-dir, the directory for the checkpoints",
    ),
    Rule(
        ("checkpoint_dir",),
        _saves_to_a_file,
        "--checkpoint-dir must be a directory, and {it.settings.checkpoint_dir} is a file",
    ),
    Rule(
        ("keep_every", "keep_last"),
        lambda it: it.settings.keep_every and not it.settings.keep_last,
        "--keep-every needs --keep-last: without it all checkpoints are kept",
    ),
    Rule(
        ("checkpoint_format",),
        lambda it: it.settings.checkpoint_format == "hdf5" and importlib.util.find_spec("h5py") is None,
        "--checkpoint-format hdf5 needs h5py: pip install h5py, or choose another format",
    ),
    Rule(
        ("strategy", "checkpoint_dir"),
        lambda it: _strategy(it).needs_checkpoint and not it.settings.checkpoint_dir,
        "--strategy {it.settings.strategy} needs --checkpoint-dir: every failure restarts from the newest checkpoint",
    ),
    Rule(
        ("reinit_from", "strategy"),
        lambda it: it.settings.reinit_from != "own" and not _strategy(it).rebuilds,
        "--reinit-from {it.settings.reinit_from} needs --strategy reinit: other strategies rebuild nothing",
    ),
    Rule(
        ("reinit_from", "checkpoint_dir"),
        lambda it: it.settings.reinit_from == "checkpoint" and not it.settings.checkpoint_dir,
        "--reinit-from checkpoint needs --checkpoint-dir, the directory of the checkpoints to resume from",
    ),
)

_AMOUNT_RULES = (
    Rule(
        ("workers", "spares", "nnodes"),
        lambda it: it.size > MOST_WORKERS,
        lambda it: (
            f"workers and spares must be at most {MOST_WORKERS}"
            f" {f'on all {it.nnodes} nodes together' if it.nnodes > 1 else 'together'}, got {it.size}"
        ),
    ),
    Rule(("max_restarts",), lambda it: it.max_restarts < 0, "--max-restarts must be at least 0, got {it.max_restarts}"),
    Rule(("max_respawns",), lambda it: it.max_respawns < 0, "--max-respawns must be at least 0, got {it.max_respawns}"),
    Rule(
        ("max_no_progress",),
        lambda it: it.max_no_progress < 0,
        "--max-no-progress must be at least 0, got {it.max_no_progress}",
    ),
    Rule(
        ("no_requeue_code",),
        lambda it: it.no_requeue_code not in (1, *range(5, 126)),
        "--no-requeue-code must be 1, or from 5 to 125, got {it.no_requeue_code}: the other exit codes have a meaning"
        " already",
    ),
    Rule(
        ("left_code",),
        lambda it: it.left_code not in (0, *range(4, 126)),
        "--left-code must be 0, or from 4 to 125, got {it.left_code}: 1, 2 and 3 mean that the run failed",
    ),
    Rule(
        ("rdzv_timeout_s",),
        lambda it: not 0 < it.rdzv_timeout_s < math.inf,
        "--rdzv-timeout must be more than 0 seconds and finite, got {it.rdzv_timeout_s:g}",
    ),
    Rule(
        ("grace_s",),
        lambda it: not 0 < it.grace_s < math.inf,
        "--grace must be more than 0 seconds and finite, got {it.grace_s:g}",
    ),
    Rule(
        ("stragglers",),
        lambda it: it.stragglers not in POLICIES,
        f"--stragglers must be one of {', '.join(POLICIES)}, got {{it.stragglers!r}}",
    ),
    Rule(
        ("stragglers", "spares", "max_respawns"),
        lambda it: it.stragglers == "replace" and not (it.settings.spares or it.max_respawns),
        "--stragglers replace needs --spares or --respawn, which provide replacements for slow workers",
    ),
    Rule(
        ("straggler_factor",),
        lambda it: not 1 < it.straggler_factor < math.inf,
        "--straggler-factor must be more than 1 and finite, got {it.straggler_factor:g}",
    ),
    Rule(
        ("max_respawns", "fabric"),
        lambda it: it.max_respawns and not it.fabric.can_join,
        "--respawn needs --fabric gloo: the {it.settings.fabric} fabric cannot add workers to a running job; use"
        " --spares",
    ),
    Rule(
        ("stall_timeout_s",),
        lambda it: not it.stall_timeout_s > 0,
        "--stall-timeout must be more than 0 seconds, got {it.stall_timeout_s:g}",
    ),
    Rule(
        ("mtbf_s", "fabric"),
        lambda it: it.mtbf_s and it.is_virtual,
        "--mtbf kills processes, and with --fabric {it.settings.fabric} all workers are in one; use --inject, or --fabric"
        " ulfm",
    ),
    Rule(
        ("mtbf_s",),
        lambda it: not 0 <= it.mtbf_s < math.inf,
        "--mtbf must be more than 0 seconds and finite, got {it.mtbf_s:g}",
    ),
)

JOB_RULES = (
    Rule(("script",), lambda it: not it.script.is_file(), _no_script),
    Rule(
        ("min_workers", "workers", "nnodes"),
        lambda it: it.settings.min_workers > it.workers,
        "--min-workers must be at most the number of workers ({it.workers}), got {it.settings.min_workers}",
    ),
    Rule(
        ("auto_slices", "workers", "nnodes"),
        lambda it: it.settings.auto_slices >= max(1, it.workers) and not it.settings.resume,
        "--slices auto:F must leave a worker: F must be below the number of workers ({it.workers}), got"
        " {it.settings.auto_slices}",
    ),
    *_CHECKPOINT_RULES,
    *_AMOUNT_RULES,
)
"""Of each launcher, where the script is."""

# -- hosts of Open MPI


def _needs_hosts(field: str) -> Rule:
    return Rule(
        (field, "hosts"),
        lambda it: getattr(it, field) and not it.hosts,
        f"--{field.replace('_', '-')} needs --hosts: it has no effect on a single machine",
    )


HOST_RULES = (
    *map(_needs_hosts, ("launch_agent", "network", "run_dir")),
    Rule(
        ("hosts", "fabric"),
        lambda it: it.hosts and not it.fabric.spans_hosts,
        "--hosts needs --fabric ulfm, got {it.settings.fabric}; with gloo, start a launcher on each machine, see"
        " docs/how-to/several-nodes.md",
    ),
    Rule(
        ("hosts", "workers", "spares"),
        lambda it: it.hosts and it.size > it.slots,
        "--hosts has {it.slots} slots, and -n and --spares ask for {it.size} workers",
    ),
)
"""Of a job whose workers mpirun starts on other machines."""


def check(job: Job) -> None:
    """Raise a ConfigError that says what to change, if the job cannot be started."""
    check_rules((*NODE_RULES, *JOB_RULES, *HOST_RULES), job)
    size_in_bytes(job.events_max)
    check_plan(job)
    for folder, flag in ((job.report_dir, "--report"), (job.log_dir, "--log-dir")):
        if folder is not None:
            check_writable(folder, flag, mode=0o700 if flag == "--log-dir" else 0o777)
    job.fabric.check_installed()
    check_hosts(job)


def check_plan(job: Job) -> None:
    """Raise a ConfigError if the fault plan does not match the workers."""
    if job.settings.faults:
        from holdfast.faults.plan import FaultPlan

        workers = range(len(job.ranks) + job.max_respawns)
        FaultPlan.from_json(job.settings.faults).check(workers, nodes=job.nnodes)
