"""``holdfast run``: train on several workers and recover from worker failures."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from holdfast.base.options import DeclaredOption, declared, fields_of, losses_of, option, variable
from holdfast.base.rules import Rule, check_rules
from holdfast.cli import INTERRUPTED, NO_JOB
from holdfast.cli.given import GroupedCommand, show_all, takes
from holdfast.cli.signals import Terminated, sigterm_as_interrupt, uninterrupted
from holdfast.config import MOST_WORKERS, Settings
from holdfast.errors import STOPPED, ConfigError
from holdfast.launch.job import MAX_RESPAWNS, Job

if TYPE_CHECKING:
    from holdfast.launch.job import JobOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """Options that only the command itself uses."""

    module: bool = option(
        False,
        help="SCRIPT is the name of a module, as for python -m.",
        manual="`SCRIPT` is the name of a module, such as `package.train`, which is run as by `python -m`",
        group="Workers",
        is_basic=True,
        flags=("--module", "-m"),
    )
    respawn: bool = option(
        False,
        help="Start a replacement for each failed worker; --fabric gloo.",
        manual="start a replacement for each failed worker; `--fabric gloo` only. It joins between two steps, with the state from a survivor's memory. A `torch.distributed` script must call [`holdfast.distributed.register`](../how-to/own-script-with-torch-distributed.md#replace-dead-ranks)",
        group="Spare and replacement workers",
        is_basic=True,
    )
    inject: tuple[str, ...] = option(
        (),
        help="Inject a fault, such as kill:rank=1,step=20 or flip:rank=1,step=20,target=weights.",
        manual="inject a fault; repeatable, see below",
        group="Fault injection",
        is_basic=True,
        metavar="SPEC",
        kind=list[str],
    )
    baseline: Path | None = option(
        None,
        help="Report of a failure-free run, to count the extra steps that failures cost.",
        manual="report of a failure-free run with the same seed; adds `iteration_cost` to `report.json`: how many more steps this run took to reach the losses of that run after the first failure",
        group="Output",
        kind=Path,
    )
    as_json: bool = option(
        False,
        help="Print report.json to stdout; all other output goes to stderr.",
        manual="print `report.json` to stdout; all other output goes to stderr",
        group="Output",
        flags=("--json",),
    )


_LAST_S = 1.0
"""A job that was asked to stop waits so long for a reader of its output that takes nothing."""
OPTIONS = declared(RunArguments, Settings, Job)


def _is_positive(parameter: str) -> Rule:
    return Rule(
        ("mtbf_s",),
        lambda it: it[parameter] is not None and not it[parameter] > 0,
        f"--{parameter.replace('_', '-')} must be more than 0 seconds, got {{it[{parameter}]:g}}",
    )


_RULES = (
    Rule(
        ("nnodes",),
        lambda it: it["nnodes"] > MOST_WORKERS,
        f"--nnodes must be at most {MOST_WORKERS}, got {{it[nnodes]}}",
    ),
    *map(_is_positive, ("expected_mtbf", "mtbf")),
    Rule(
        ("max_respawns", "respawn"),
        lambda it: it["max_respawns"] is not None and not it["respawn"],
        "--max-respawns {it[max_respawns]} needs --respawn: without it, failed workers are not replaced",
    ),
    Rule(
        ("max_respawns",),
        lambda it: it["max_respawns"] is not None and it["max_respawns"] > MOST_WORKERS,
        f"--max-respawns must be at most {MOST_WORKERS}, got {{it[max_respawns]}}",
    ),
)
"""Rules of the command line alone: its options may be left out, and numbers of workers would be counted up before a job is made."""
_CONVERTED = ("token", "slices", "checkpoint_every")
"""Settings whose value is not that of the option."""
_OF_TORCHRUN = {"nproc-per-node": "workers", "rdzv-endpoint": "rdzv"}
"""Options of torchrun that mean the same as ours, and have another name."""
_SCHEDULED = ("nnodes", "node_rank", "workers", "rdzv", "max_restarts", "left_code", "fabric")
"""Parameters that a scheduler may set; see :mod:`holdfast.launch.schedulers`."""


def our_name(name: str) -> str:
    """Return our name of an option; torchrun's names are accepted, too, and underscores for hyphens, as there."""
    name = name.replace("_", "-")
    return _OF_TORCHRUN.get(name, name)


class RunCommand(GroupedCommand):
    """The command, whose ``--help`` lists its basic options."""

    basic = frozenset(each.parameter for each in OPTIONS if each.option.is_basic)


@takes(OPTIONS)
def run(
    context: Context,
    script: Annotated[
        Path, Argument(metavar="SCRIPT", help="The training script, or -- python SCRIPT.", show_default=False)
    ],
    args: Annotated[list[str] | None, Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    help_all: Annotated[
        bool, Option("--help-all", help="Show every option, by group, and exit.", is_eager=True, callback=show_all)
    ] = False,
    **given: Any,
) -> int:
    """Train SCRIPT on N workers, and recover when workers fail.

    Options come before SCRIPT, arguments of the script after it; only --report may also come last.

    Example: holdfast run -n 4 --inject kill:rank=1,step=20 --report out train.py --epochs 3
    """
    from holdfast.cli.output import RunOutput

    if line := _take_scheduled(context, given):
        print(f"holdfast: {line}", file=sys.stderr)
    _check(given)
    arguments = RunArguments(**{each.name: given[each.parameter] or each.default for each in fields_of(RunArguments)})
    job = _job(script, args or [], given, arguments)
    _check_baseline(arguments.baseline, job.report_dir)
    with RunOutput() as output:
        exit_code = _launch(job, arguments)
        if exit_code == STOPPED:
            output.patience_s = _LAST_S
        output.drain()
        if arguments.as_json and output.error is not None:  # the report is what the caller waits for
            return exit_code or 1
    return exit_code


def _launch(job: Job, arguments: RunArguments) -> int:
    """Run the job and show how it ended; return the exit code."""
    from holdfast.launch.hash_seed import hash_seed_line
    from holdfast.launch.launcher import launch
    from holdfast.observe.terminal.views import make_view

    if line := hash_seed_line(job.settings):
        print(f"holdfast: {line}", file=sys.stderr)
    try:
        with sigterm_as_interrupt():
            outcome = launch(job, make_view(sys.stderr if arguments.as_json else sys.stdout))
    except Terminated:  # before the job begins, which handles signals itself
        print("holdfast: stopped before the job began", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(NO_JOB, file=sys.stderr)
        return INTERRUPTED
    with uninterrupted():
        report_dir = job.report_dir if outcome.is_reported else None
        if arguments.baseline is not None and report_dir is not None and outcome.report["outcome"] == "done":
            _add_cost(outcome.report, report_dir, arguments.baseline)
        _show(outcome, report_dir, as_json=arguments.as_json)
    return outcome.exit_code


def _take_scheduled(context: Context, given: dict[str, Any]) -> str:
    """Add the options that a scheduler sets to ``given``; return a line that says which."""
    from holdfast.launch.schedulers import read_scheduler
    from holdfast.launch.supervise.gpus import find_gpus

    sources = {name: context.get_parameter_source(name) for name in (*_SCHEDULED, "hosts")}
    choices = {name: given[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    choices |= {name: os.environ[variable(name)] for name in ("workers", "fabric") if variable(name) in os.environ}
    scheduled = read_scheduler(os.environ, choices, len(os.sched_getaffinity(0)), find_gpus)
    given.update(scheduled.values)
    return scheduled.said


def _check(given: dict[str, Any]) -> None:
    """Check values for which the command line has its own rules; the ConfigError names the option."""
    values = [(each, given[each.parameter]) for each in OPTIONS if given[each.parameter] is not None]
    for each, value in values:
        how = each.option
        if how.least_given is not None and value < how.least_given:
            why = f", because {how.because}" if how.because else ""
            raise ConfigError(f"{each.flag} must be at least {how.least_given}{why}, got {value}")
    check_rules(_RULES, given)


def _job(script: Path, args: list[str], given: dict[str, Any], arguments: RunArguments) -> Job:
    """Return the job for the launcher; the ConfigError names an option whose value is not allowed."""
    from holdfast.launch.fleet.hostlist import parse_hosts
    from holdfast.launch.schedulers import with_port
    from holdfast.launch.target import find_target

    limit = given["max_respawns"]
    newcomers = (MAX_RESPAWNS if limit is None else limit) if arguments.respawn else 0
    script_args, last_report = _split_off_report(args)
    target = find_target(str(script), script_args, is_module=arguments.module)
    if given["rdzv"] is not None and "://" not in given["rdzv"]:
        given["rdzv"] = f"holdfast://{with_port(given['rdzv'])}" if given["rdzv"] else None
    machines = parse_hosts(given["hosts"]) if given["hosts"] is not None else ()
    if given["workers"] is None:
        given["workers"] = max(1, sum(host.slots for host in machines) - (given["spares"] or 0))
    settings = _settings(given)
    fabric, faults = settings.fabric or "ulfm", _plan(list(arguments.inject), settings, given["nnodes"], newcomers)
    settings = dataclasses.replace(settings, fabric=fabric, faults=faults, token=given["rdzv_token"] or "")
    settings = dataclasses.replace(settings, ranks="", rank=-1, store="", run_dir="")
    for_launcher = {each.name: given[each.parameter] for each in declared(Job) if given[each.parameter] is not None} | {
        "max_respawns": newcomers,
        "hosts": machines,
        "report_dir": given["report"] or last_report,
        "log_to": tuple(given["log_to"] or ()),
    }
    return Job(script=target.script, args=target.args, module=target.module, settings=settings, **for_launcher)


def _settings(given: dict[str, Any]) -> Settings:
    """Return the settings from options and environment; the ConfigError names the option, if it was given."""
    options = {each.name: each for each in declared(Settings)}
    values = {name: _value(each, given[each.parameter]) for name, each in options.items() if name not in _CONVERTED}
    values |= _slices(given["slices"]) | _how_often(given["checkpoint_every"])
    try:
        return Settings.from_env(**values)
    except ConfigError as error:
        name, _, what = str(error).partition(" ")
        if name not in options or values.get(name) is None:
            raise
        raise ConfigError(f"{options[name].flag} {what}") from error


def _value(option: DeclaredOption, value: Any) -> Any:
    """Return the setting of an option; None if it was not given. A switch can only be changed from its default."""
    return (not option.default if value else None) if option.kind is bool else value


def _slices(value: str | None) -> dict[str, Any]:
    """Return the settings of ``--slices``; raise a ConfigError if it is neither a number nor ``auto``."""
    if value is None:
        return {}
    try:
        return {"slices": int(value), "auto_slices": -1}
    except ValueError:
        return {"slices": 0, "auto_slices": losses_of(value, "--slices")}


def _how_often(checkpoint_every: str | None) -> dict[str, Any]:
    """Return the settings of ``--checkpoint-every``; raise a ConfigError if it is neither a number nor ``auto``."""
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
        raise ConfigError(f"--checkpoint-every must be {what}, got {checkpoint_every}")
    return {"checkpoint_auto": False, "checkpoint_every": steps}


def _split_off_report(args: list[str]) -> tuple[tuple[str, ...], Path | None]:
    """Return the script's arguments without a final ``--report DIR``, and DIR."""
    match args:
        case [*others, "--report", directory] if "--" not in others:
            return tuple(others), Path(directory)
    return tuple(args), None


def _plan(specs: list[str], settings: Settings, nnodes: int, newcomers: int) -> str:
    """Return the fault plan as JSON; the plan of the environment if there are no ``specs``."""
    if not specs:
        return settings.faults
    from holdfast.faults.plan import FaultPlan, parse

    try:
        plan = FaultPlan(tuple(parse(spec) for spec in specs), settings.seed)
        plan.check(range(nnodes * (settings.workers + settings.spares) + newcomers), nodes=nnodes)
    except ConfigError as error:
        raise ConfigError(f"--inject {error}") from error
    return plan.to_json()


def _check_baseline(baseline: Path | None, report_dir: Path | None) -> None:
    """Check ``--baseline`` before anything runs; the ConfigError names the option."""
    if baseline is None:
        return
    from holdfast.tools.against import read_losses

    if report_dir is None:
        raise ConfigError(f"--baseline {baseline} needs --report DIR, from which this run's losses are read")
    read_losses(baseline)


def _add_cost(report: dict[str, Any], report_dir: Path, baseline: Path) -> None:
    """Add the cost of failures, in steps relative to a failure-free run, to the report."""
    from holdfast.summary.files import save_report
    from holdfast.tools.against import cost_against

    try:
        report["iteration_cost"] = cost_against(report_dir, baseline)
        save_report(report, report_dir)
    except ConfigError as error:
        print(f"holdfast: not compared: {error}", file=sys.stderr)


def _show(outcome: JobOutcome, report_dir: Path | None, *, as_json: bool) -> None:
    """Print the summary, then why the run failed: a traceback comes last, where it is visible."""
    from holdfast.observe.report_text import is_distributed
    from holdfast.observe.terminal.table import summary_lines

    if as_json:
        print(json.dumps(outcome.report, indent=1))
    report = outcome.report
    # A script may use torch.distributed without DistributedDataParallel: it then has no steps.
    worth_it = report["steps"] or (is_distributed(report) and report["outcome"] == "done")
    lines = summary_lines(report, report_dir) if worth_it and outcome.is_shown else []
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr if as_json else sys.stdout)
    if outcome.mpirun_output:
        print(outcome.mpirun_output, file=sys.stderr)
    if outcome.message:
        word = "holdfast" if outcome.exit_code in (0, STOPPED) else "error"  # 0: this node left, and the job continues
        print(f"{word}: {outcome.message}", file=sys.stderr)
    if outcome.traceback:
        print(outcome.traceback.rstrip(), file=sys.stderr)
