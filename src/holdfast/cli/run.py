"""``holdfast run``: train on several workers, and survive the loss of some."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.signals import sigterm_as_interrupt
from holdfast.config import (
    BATCHES,
    CHECKPOINT_FORMATS,
    FABRICS,
    GUARDS,
    KINDS,
    MIRROR_CHOICES,
    MIRROR_CODECS,
    MIRROR_DISTANCES,
    MIRROR_OPTIMIZERS,
    MIRROR_PREDICTORS,
    MOST_WORKERS,
    ORDERS,
    REINIT_FROM,
    RESCALES,
    SPLITS,
    STRATEGIES,
    UPDATES,
    Settings,
    losses_of,
)
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.launch.job import Outcome


def _one_of(names: tuple[str, ...]) -> str:
    return "|".join(names)


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Handed on to the script.")] = None,
    *,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", metavar="N", help="Workers on this machine, or on all --hosts [1].")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOST:N,...|FILE|slurm", help="Machines to start workers on; --fabric ulfm.")
    ] = None,
    launch_agent: Annotated[
        str | None, typer.Option(metavar="CMD", help="What reaches them, as CMD HOST COMMAND [ssh].")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="NET", help="By which they talk: an interface, or ADDRESS/BITS [any].")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder that they all see [that of --checkpoint-dir].")
    ] = None,
    nnodes: Annotated[int, typer.Option(metavar="N", help="Machines, each with a launcher and so many workers.")] = 1,
    node_rank: Annotated[int, typer.Option(metavar="R", help="Which of them this is, from 0.")] = 0,
    rdzv: Annotated[
        str | None, typer.Option(metavar="URL", help="Where they meet: holdfast://HOST:PORT or etcd://HOST:PORT/JOB.")
    ] = None,
    rdzv_token: Annotated[
        str | None, typer.Option(metavar="SECRET", envvar="HOLDFAST_TOKEN", help="What all nodes must know.")
    ] = None,
    rdzv_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the others.")] = 300.0,
    node_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A machine that is not heard of for so long is lost.")
    ] = 10.0,
    fabric: Annotated[str | None, typer.Option(metavar=_one_of(FABRICS), help="How they talk [ulfm].")] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar=_one_of(STRATEGIES), help="What survivors do [rollback].")
    ] = None,
    reinit_from: Annotated[
        str | None, typer.Option(metavar=_one_of(REINIT_FROM), help="What --strategy reinit goes on from [own].")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(metavar="V|auto[:F]", help="Pieces of a mini-batch, for the whole job [N].")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar=_one_of(ORDERS), help="Order in which they are added [fold].")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar=_one_of(SPLITS), help="After a failure: hand slices over, or cut anew [slices]."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar=_one_of(BATCHES), help="After a failure: which size stays [global].")
    ] = None,
    rescale: Annotated[
        str | None, typer.Option(metavar=_one_of(RESCALES), help="Divide an incomplete sum by [survivors].")
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(metavar=_one_of(UPDATES), help="The optimizer runs after all sums, or bucket by bucket [lazy]."),
    ] = None,
    guard: Annotated[
        str | None,
        typer.Option(
            metavar=_one_of(GUARDS), help="When replicas differ, or with warn and heal values are absurd [stop]."
        ),
    ] = None,
    guard_sums: Annotated[
        bool, typer.Option("--guard-sums", help="Checksums go with what is summed; whoever adds it looks.")
    ] = False,
    kinds: Annotated[
        str | None,
        typer.Option(metavar=_one_of(KINDS), help="Workers whose bits would differ: refused, or taken [same]."),
    ] = None,
    no_certificate: Annotated[
        bool, typer.Option("--no-certificate", help="Write no digests of each step, which diff-runs and verify read.")
    ] = False,
    spares: Annotated[
        int | None, typer.Option(metavar="K", help="Workers that wait, warm, to take the place of who dies [0].")
    ] = None,
    mirror: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Workers that hold each part of a split model beside those that compute it [1]."
        ),
    ] = None,
    mirror_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="1: they apply every step. Above, with --strategy partial: a whole copy is sent to them in so many [1].",
        ),
    ] = None,
    mirror_fraction: Annotated[
        float | None, typer.Option(metavar="R", help="How much of a copy at a time: the smaller, the more often [1].")
    ] = None,
    mirror_choice: Annotated[
        str | None,
        typer.Option(metavar=_one_of(MIRROR_CHOICES), help="What is sent first [priority: what moved most]."),
    ] = None,
    mirror_distance: Annotated[
        str | None,
        typer.Option(
            metavar=_one_of(MIRROR_DISTANCES), help="What moved most by: parameters, or all that is sent [euclidean]."
        ),
    ] = None,
    mirror_predictor: Annotated[
        str | None,
        typer.Option(
            metavar=_one_of(MIRROR_PREDICTORS),
            help="Restore the last value, the line through two, or part of the way along it [last].",
        ),
    ] = None,
    mirror_codec: Annotated[
        str | None, typer.Option(metavar=_one_of(MIRROR_CODECS), help="Send numbers, or differences of a byte [exact].")
    ] = None,
    mirror_optimizer: Annotated[
        str | None,
        typer.Option(metavar=_one_of(MIRROR_OPTIMIZERS), help="The optimizer's state of a part that is lost [saved]."),
    ] = None,
    respawn: Annotated[bool, typer.Option("--respawn", help="Start a new worker for each that dies.")] = False,
    max_respawns: Annotated[int | None, typer.Option(metavar="R", help="How many, at most [16].")] = None,
    min_workers: Annotated[int | None, typer.Option(metavar="M", help="Below this: save and stop [1].")] = None,
    max_restarts: Annotated[int, typer.Option(metavar="R", help="How often the whole job may be started again.")] = 3,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Start again if all workers wait for each other this long.")
    ] = 60.0,
    hang_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="End a worker that gives no sign for so long [30]; 0: never."),
    ] = None,
    start_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a worker that keeps the others waiting for so long at the start [120]; 0: never.",
        ),
    ] = None,
    stragglers: Annotated[
        str, typer.Option(metavar="ignore|warn|rebalance|replace", help="What to do about slow workers.")
    ] = "warn",
    straggler_factor: Annotated[float, typer.Option(metavar="X", help="Slow: X times the median of the others.")] = 2.0,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Break something: kill:rank=1,step=20[,phase=allreduce[,bucket=2]], flip:rank=1,step=20,target=weights.",
        ),
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Kill random workers, on average one in so many seconds.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Of the samples' order, the model and the kills [0].")
    ] = None,
    checkpoint_dir: Annotated[
        str | None, typer.Option(metavar="URL", help="Where checkpoints are: a folder, or s3://bucket/run.")
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(metavar="STEPS|auto", help="Steps between checkpoints, or as often as pays.")
    ] = None,
    checkpoint_format: Annotated[
        str | None, typer.Option(metavar=_one_of(CHECKPOINT_FORMATS), help="Of their files [safetensors].")
    ] = None,
    keep_last: Annotated[int | None, typer.Option(metavar="K", help="Keep only so many of the newest [all].")] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", help="Besides these, keep those of every N-th step.")
    ] = None,
    expected_mtbf: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Between failures, until some are seen; for auto [a day]."),
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time to finish a step and save after SIGTERM.")
    ] = 30.0,
    stop_after: Annotated[
        int | None, typer.Option(metavar="STEP", help="Save and stop when this step is committed; exit code 4.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest intact checkpoint.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep each worker's output in a file here.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, events.jsonl, index.html here.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Draw the page of the report, too.", show_default=False)
    ] = True,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The report of an undisturbed run, to say what this one's failures cost in steps."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json on stdout; all else goes to stderr.")
    ] = False,
) -> int:
    """Train SCRIPT on N workers; when some die, the others go on.

    Options stand before SCRIPT; what stands behind it is the script's, but for --report, which may come last.

    Example: holdfast run -n 4 --inject kill:rank=1,step=20 --report out train.py --epochs 3
    """
    from holdfast.launch.hostlist import parse_hosts
    from holdfast.launch.job import Job
    from holdfast.launch.launcher import launch
    from holdfast.launch.live import make_view

    _check(
        workers=workers,
        nnodes=nnodes,
        mirror=mirror,
        mtbf=mtbf,
        keep_last=keep_last,
        keep_every=keep_every,
        expected_mtbf=expected_mtbf,
        stop_after=stop_after,
    )
    newcomers = _newcomers(max_respawns, respawn=respawn)
    script_args, last_report = _split_off_report(args or [])
    machines = parse_hosts(hosts) if hosts is not None else ()
    if workers is None:
        workers = max(1, sum(host.slots for host in machines) - (spares or 0))
    settings = _settings(
        workers=workers,
        spares=spares,
        fabric=fabric,
        strategy=strategy,
        reinit_from=reinit_from,
        **_slices(slices),
        order=order,
        split=split,
        batch=batch,
        rescale=rescale,
        update=update,
        guard=guard,
        guard_sums=guard_sums or None,
        kinds=kinds,
        certificate=False if no_certificate else None,
        mirror=mirror,
        mirror_every=mirror_every,
        mirror_fraction=mirror_fraction,
        mirror_choice=mirror_choice,
        mirror_distance=mirror_distance,
        mirror_predictor=mirror_predictor,
        mirror_codec=mirror_codec,
        mirror_optimizer=mirror_optimizer,
        min_workers=min_workers,
        seed=seed,
        checkpoint_dir=checkpoint_dir,
        **_how_often(checkpoint_every),
        checkpoint_format=checkpoint_format,
        keep_last=keep_last,
        keep_every=keep_every,
        mtbf_s=expected_mtbf,
        hang_timeout_s=hang_timeout,
        start_timeout_s=start_timeout,
        stop_after=stop_after,
        resume=resume or None,
    )
    settings = dataclasses.replace(
        settings,
        fabric=settings.fabric or "ulfm",
        faults=_plan(inject or [], settings, nnodes, newcomers),
        ranks="",
        rank=-1,
        store="",
        token=rdzv_token or "",
        run_dir="",
    )
    job = Job(
        script=script,
        args=script_args,
        settings=settings,
        max_restarts=max_restarts,
        max_respawns=newcomers,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv=rdzv or "",
        rdzv_timeout_s=rdzv_timeout,
        node_timeout_s=node_timeout,
        hosts=machines,
        launch_agent=launch_agent or "",
        network=network or "",
        run_dir=run_dir,
        stragglers=stragglers,
        straggler_factor=straggler_factor,
        stall_timeout_s=stall_timeout,
        mtbf_s=mtbf or 0.0,
        grace_s=grace,
        log_dir=log_dir,
        report_dir=report or last_report,
        page=page,
    )
    _check_baseline(baseline, job.report_dir)
    try:
        with sigterm_as_interrupt():
            outcome = launch(job, make_view(sys.stderr if as_json else sys.stdout))
    except KeyboardInterrupt:  # before the job begins; later it takes signals itself
        print("stopped", file=sys.stderr)
        return 1
    if (
        baseline is not None
        and job.report_dir is not None
        and outcome.is_reported
        and outcome.report["outcome"] == "done"
    ):
        _add_cost(outcome.report, job.report_dir, baseline)
    _show(outcome, job.report_dir if outcome.is_reported else None, as_json=as_json)
    return outcome.exit_code


def _check(**given: Any) -> None:
    """Refuse what only the command line can get wrong.

    Raises:
        ConfigError: naming the option.
    """
    for name, least in (
        ("workers", 1),
        ("nnodes", 1),
        ("mirror", 0),
        ("keep_last", 2),
        ("keep_every", 1),
        ("stop_after", 0),
    ):
        if given[name] is not None and given[name] < least:
            why = ", because the newest may turn out to be damaged" if name == "keep_last" else ""
            msg = f"--{name.replace('_', '-')} must be at least {least}{why}, got {given[name]}"
            raise ConfigError(msg)
    if given["nnodes"] > MOST_WORKERS:
        msg = f"--nnodes must be at most {MOST_WORKERS}, got {given['nnodes']}"
        raise ConfigError(msg)
    for name in ("mtbf", "expected_mtbf"):
        if given[name] is not None and not given[name] > 0:
            msg = f"--{name.replace('_', '-')} must be more than 0 seconds, got {given[name]:g}"
            raise ConfigError(msg)


def _newcomers(max_respawns: int | None, *, respawn: bool) -> int:
    """Return how many workers may be started in the place of the dead.

    Raises:
        ConfigError: if there is a limit without --respawn, or it is too high.
    """
    from holdfast.launch.job import MAX_RESPAWNS

    if max_respawns is not None and not respawn:
        msg = f"--max-respawns {max_respawns} needs --respawn: without it nobody is started in the place of the dead"
        raise ConfigError(msg)
    if max_respawns is not None and max_respawns > MOST_WORKERS:
        msg = f"--max-respawns must be at most {MOST_WORKERS}, got {max_respawns}"
        raise ConfigError(msg)
    return (MAX_RESPAWNS if max_respawns is None else max_respawns) if respawn else 0


def _settings(**given: Any) -> Settings:
    """Return the settings: those given, then those of the environment.

    Raises:
        ConfigError: if one is not allowed; it names the option of one that was given.
    """
    from holdfast.launch.job import OPTIONS

    try:
        return Settings.from_env(**given)
    except ConfigError as error:
        name, _, what = str(error).partition(" ")
        option = {field: option for option, field in (*OPTIONS, ("--workers", "workers"))}.get(name)
        if option is None or given.get(name) is None:
            raise
        msg = f"{option} {what}"
        raise ConfigError(msg) from error


def _slices(given: str | None) -> dict[str, Any]:
    """Return the settings of ``--slices``.

    Raises:
        ConfigError: if it is neither a number nor ``auto``.
    """
    if given is None:
        return {}
    try:
        return {"slices": int(given), "auto_slices": -1}
    except ValueError:
        return {"slices": 0, "auto_slices": losses_of(given, "--slices")}


def _how_often(checkpoint_every: str | None) -> dict[str, Any]:
    """Return the settings of ``--checkpoint-every``.

    Raises:
        ConfigError: if it is neither a number of steps nor ``auto``.
    """
    if checkpoint_every is None:
        return {}
    if checkpoint_every == "auto":
        return {"checkpoint_auto": True, "checkpoint_every": 0}
    try:
        steps = int(checkpoint_every)
    except ValueError:
        steps = None
    if steps is None or steps < 1:
        what = "a number of steps, at least 1, or auto" if steps is None else "at least 1"
        msg = f"--checkpoint-every must be {what}, got {checkpoint_every}"
        raise ConfigError(msg)
    return {"checkpoint_auto": False, "checkpoint_every": steps}


def _split_off_report(args: list[str]) -> tuple[tuple[str, ...], Path | None]:
    """Return the script's arguments without a final ``--report DIR``, and DIR."""
    match args:
        case [*others, "--report", directory] if "--" not in others:
            return tuple(others), Path(directory)
        case _:
            return tuple(args), None


def _plan(specs: list[str], settings: Settings, nnodes: int, newcomers: int) -> str:
    """Return the fault plan as JSON; that of the environment if there are no ``specs``."""
    if not specs:
        return settings.faults
    from holdfast.faults.plan import FaultPlan, parse

    try:
        plan = FaultPlan(tuple(parse(spec) for spec in specs), settings.seed)
        plan.check(range(nnodes * (settings.workers + settings.spares) + newcomers), nodes=nnodes)
    except ConfigError as error:
        msg = f"--inject {error}"
        raise ConfigError(msg) from error
    return plan.to_json()


def _check_baseline(baseline: Path | None, report_dir: Path | None) -> None:
    """Refuse before anything runs what could not be compared after it.

    Raises:
        ConfigError: naming the option.
    """
    if baseline is None:
        return
    from holdfast.report.against import read_losses

    if report_dir is None:
        msg = f"--baseline {baseline} needs --report DIR: this run's losses are read from there"
        raise ConfigError(msg)
    read_losses(baseline)


def _add_cost(report: dict[str, Any], report_dir: Path, baseline: Path) -> None:
    """Say in the report what the failures cost, in steps, against an undisturbed run."""
    from holdfast.report import save_report
    from holdfast.report.against import cost_against

    try:
        report["iteration_cost"] = cost_against(report_dir, baseline)
        save_report(report, report_dir)
    except ConfigError as error:
        print(f"holdfast: not compared: {error}", file=sys.stderr)


def _show(outcome: Outcome, report_dir: Path | None, *, as_json: bool) -> None:
    """Print the summary, then why it failed: a traceback comes last, where it is seen."""
    from holdfast.report import summary_lines
    from holdfast.report.formatting import is_distributed

    if as_json:
        print(json.dumps(outcome.report, indent=1))
    report = outcome.report
    # A script may use torch.distributed without DistributedDataParallel: it has no steps, and is done all the same.
    worth_it = report["steps"] or (is_distributed(report) and report["outcome"] == "done")
    lines = summary_lines(report, report_dir) if worth_it else []
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr if as_json else sys.stdout)
    if outcome.mpirun_says:
        print(outcome.mpirun_says, file=sys.stderr)
    if outcome.message:
        word = "holdfast" if outcome.exit_code == 4 else "error"
        print(f"{word}: {outcome.message}", file=sys.stderr)
    if outcome.traceback:
        print(outcome.traceback.rstrip(), file=sys.stderr)
