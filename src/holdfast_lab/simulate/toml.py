"""Reads scenario files: from TOML to one scenario per strategy. docs/how-to/write-a-scenario.md describes the format."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, MOST_STEPS, check_mtbf, check_range
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.costs import OF_STORAGE, SAVING, Costs
from holdfast_lab.simulate.distributions import Constant, Distribution, make_distribution
from holdfast_lab.simulate.failures import Down, Failures, Source
from holdfast_lab.simulate.job import SimulatedJob
from holdfast_lab.simulate.logs.reading import options_of_table
from holdfast_lab.simulate.measured import read_measured
from holdfast_lab.simulate.price_table import step_parts_s
from holdfast_lab.simulate.scenario import Scenario
from holdfast_lab.simulate.traces import read_log_trace, read_trace

if TYPE_CHECKING:
    from pydantic import ValidationError

    from holdfast_lab.simulate.logs.fitted import FittedLog
    from holdfast_lab.simulate.schema import (
        CostsTable,
        ScenarioSchema,
        SourceTable,
        StrategyTable,
        TimesTable,
        TraceTable,
    )

_NOT_OF_JOB = ("strategy", "name", "spares", "save_every", "work_s")
_WHOLE_JOB, _ONE_RACK = "job", 10_000_000
"""The simulator models a failure of the whole job as a failure of the one rack that contains all nodes."""
_ANY_LOG = "log"
"""The kind of a trace whose form is recognised."""
_ENDLESS_S = 1.0
"""A placeholder horizon until the length of a step is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySetting:
    """One of the compared settings.

    Args:
        name: Its name.
        scenario: Its scenario, in which ``save_every`` is 0 and does not count.
        every: The checkpoint interval: steps, a time in seconds as a float, or one of
            :data:`~holdfast_lab.simulate.schema.EVERY`.
    """

    name: str
    scenario: Scenario
    every: int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFile:
    """The content of a scenario file.

    Args:
        title: Title of the page, or "".
        repetitions: Histories per setting, ``>= 2``.
        seed: Seed of everything random.
        settings: The settings to compare, with distinct names.
        said: What logs in it were taken for, and what was fitted to them, in lines.
        logs: The logs that distributions were fitted to.
    """

    title: str
    repetitions: int
    seed: int
    settings: tuple[StrategySetting, ...]
    said: tuple[str, ...] = ()
    logs: tuple[FittedLog, ...] = ()


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario file. Paths in it are relative to its directory.

    Raises:
        ConfigError: if it cannot be read, or a value is not allowed; the message says where.
    """
    try:
        from pydantic import ValidationError

        from holdfast_lab.simulate.schema import ScenarioSchema
    except ImportError:
        raise ConfigError("scenario files need pydantic, which is not installed: pip install 'holdfast[lab]'") from None
    if path.exists() and not path.is_file():  # a pipe or a device, which may never end
        raise ConfigError(f"cannot read {path}: it is no file")
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not TOML: its brackets are nested too deep") from error
    try:
        file = ScenarioSchema.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_complaint(error)}") from error
    try:
        return _made(file, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


# -- conversion of tables


def _made(file: ScenarioSchema, folder: Path) -> ScenarioFile:
    said: list[str] = []
    logs: list[FittedLog] = []
    down = _down(file, folder, said, logs)
    settings = [_setting(file, strategy, down, folder) for strategy in file.strategies]
    names = [setting.name for setting in settings]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two strategies have the name {double[0]!r}; give each its own name, such as "
            f"{{strategy = ..., name = ...}}"
        )
    return ScenarioFile(
        title=file.title,
        repetitions=file.repetitions,
        seed=file.seed,
        settings=tuple(settings),
        said=tuple(said),
        logs=tuple(logs),
    )


def _setting(file: ScenarioSchema, strategy: StrategyTable, down: Down, folder: Path) -> StrategySetting:
    given = file.cluster.given()
    if strategy.spares is not None:
        given["spares"] = strategy.spares
    if any(table.level == _WHOLE_JOB for table in file.failures or ()):
        given["nodes_per_rack"] = _ONE_RACK
    cluster = Cluster(**given)
    policies = file.job.given(*_NOT_OF_JOB) | strategy.given(*_NOT_OF_JOB)
    if file.job.steps is None and file.job.work_s is None and file.job.horizon_s is None:
        raise ConfigError(
            "[job] needs steps, work_s (their undisturbed duration) or horizon_s; otherwise it never ends"
        )
    if file.job.steps is not None and file.job.work_s is not None:
        raise ConfigError("[job] has both steps and work_s, which mean the same; leave one out")
    policies.setdefault("horizon_s", None if file.job.steps else _ENDLESS_S)
    job = SimulatedJob(strategy=strategy.strategy, **policies)
    scenario = _with_costs(file.costs, cluster, job, down, folder)
    if file.job.work_s is not None:
        policies["steps"] = _steps(file.job.work_s, scenario.full_step_s)
        policies["horizon_s"] = file.job.horizon_s
        scenario = Scenario(cluster, SimulatedJob(strategy=strategy.strategy, **policies), scenario.costs, down)
    every = strategy.save_every if "save_every" in strategy.model_fields_set else file.job.save_every
    return StrategySetting(name=strategy.name or strategy.strategy, scenario=scenario, every=every)


def _steps(work_s: float, step_s: float) -> int:
    """Return the number of steps that take ``work_s``."""
    check_range("work_s", work_s, 0, most=LONGEST_S)
    if work_s > MOST_STEPS * step_s:
        raise ConfigError(
            f"work_s is more than {MOST_STEPS:g} steps of {step_s:g} s, the largest number that can be simulated; "
            "check the duration of a step"
        )
    return max(1, round(work_s / step_s))


def _with_costs(table: CostsTable, cluster: Cluster, job: SimulatedJob, down: Down, folder: Path) -> Scenario:
    """Return the scenario with the costs of the table; written costs take precedence over measured ones."""
    measured: dict[str, float] = {}
    if table.from_report:
        measured = read_measured(folder / table.from_report).apart()
    given = table.given("from_report", "step_s", *OF_STORAGE)
    says_step = {"slice_s", "steps_s"} & set(given)
    if table.step_s is not None and says_step:
        raise ConfigError(f"[costs] has both step_s and {says_step.pop()}, which mean the same; leave one out")
    step_s = table.step_s if says_step or table.step_s is not None else measured.get("step_s")
    others = {n: value for n, value in measured.items() if n not in ("step_s", "state_bytes")} | given
    speeds = {name: value for name in OF_STORAGE if (value := getattr(table, name)) is not None}
    if speeds:
        others = {name: value for name, value in others.items() if name in given or name not in SAVING}
        speeds.setdefault("state_bytes", measured.get("state_bytes", -1.0))
        if speeds["state_bytes"] < 0 or "write_bytes_per_s" not in speeds:
            raise ConfigError(
                f"[costs] has {', '.join(speeds)}: the cost of a checkpoint needs both state_bytes and "
                "write_bytes_per_s"
            )
        costs = Costs.of_storage(**speeds, **others)
    else:
        costs = Costs(**others)
    return of_step(cluster, job, costs, down, step_s)


def of_step(cluster: Cluster, job: SimulatedJob, costs: Costs, down: Down, step_s: float | None) -> Scenario:
    """Return the scenario in which a step takes ``step_s`` with all workers, excluding ``update_s``.

    The rest besides the all-reduces is computing.

    Args:
        cluster: The machines.
        job: The job that runs on them.
        costs: Costs without the time of a slice; with it if ``step_s`` is None.
        down: The outages.
        step_s: Seconds.

    Raises:
        ConfigError: if the all-reduces alone take as long.
    """
    if step_s is None:
        return Scenario(cluster, job, costs, down)
    probe = Scenario(cluster, job, _replaced(costs, slice_s=1.0), down)
    compute, sums = step_parts_s(probe.cluster, probe.job, probe.costs)
    if step_s <= sums[-1]:
        raise ConfigError(f"step_s must be more than the time of its all-reduces, {sums[-1]:g} s, got {step_s:g}")
    return Scenario(cluster, job, _replaced(costs, slice_s=float((step_s - sums[-1]) / compute[-1])), down)


def _replaced(costs: Costs, **changes: float) -> Costs:
    import dataclasses

    return dataclasses.replace(costs, **changes)  # type: ignore[arg-type]  # all changes are numbers


def _down(file: ScenarioSchema, folder: Path, said: list[str], logs: list[FittedLog]) -> Down:
    """Return the source of outages; append what logs were taken for, and those with a fit."""
    if file.trace is not None:
        return _trace(file.trace, folder, said)
    cluster = Cluster(**file.cluster.given("spares"))  # counted failures are those of active workers
    levels = {table.level for table in file.failures or ()}
    if _WHOLE_JOB in levels and "rack" in levels:
        raise ConfigError(
            "[[failures]] has both level job and level rack; use one of them, because the simulator models a job "
            "failure as a failure of one rack with all nodes"
        )
    sources = [
        _fitted_source(number, table, folder, logs) if table.log else _source(number, table, cluster)
        for number, table in enumerate(file.failures or (), 1)
    ]
    said += [line for log in logs for line in log.lines()]
    failures = Failures(tuple(sources))
    check_mtbf(failures.mtbf_s(cluster))
    return failures


def _trace(table: TraceTable, folder: Path, said: list[str]) -> Down:
    choices = table.given("path", "kind", "level", "replayed", "reading")
    if table.kind == _ANY_LOG:
        if choices:
            raise ConfigError(
                f"[trace] of kind log has {', '.join(choices)}; how to read it is said in reading = {{...}}"
            )
        options = options_of_table(table.reading or {})
        trace, log = read_log_trace(folder / table.path, options, level=table.level, replayed=table.replayed)
        said += log.said
        return trace
    if table.reading is not None:
        raise ConfigError("[trace] has reading, which only kind log takes")
    return read_trace(folder / table.path, table.kind, level=table.level, replayed=table.replayed, **choices)


def _fitted_source(number: int, table: SourceTable, folder: Path, logs: list[FittedLog]) -> Source:
    """Return failures with a lifetime that is fitted to a log, and append the log."""
    where = f"[[failures]] number {number}"
    odd = table.given("level", "age_s", "stationary", "repair", "log", "fit", "reading")
    if odd:
        raise ConfigError(
            f"{where} has a log, to which its lifetime is fitted, and also {', '.join(odd)}; leave one out"
        )
    from holdfast_lab.simulate.logs.fitted import fit_log

    fitted = fit_log(folder / table.log, options_of_table(table.reading or {}), table.fit or "best")
    logs.append(fitted)
    level = "rack" if table.level == _WHOLE_JOB else table.level
    repair = Constant(0.0) if table.repair is None else _times(table.repair, f"repair of {where}")
    return Source(level, fitted.chosen.distribution, repair, table.age_s, table.stationary)


def _source(number: int, table: SourceTable, cluster: Cluster) -> Source:
    where = f"[[failures]] number {number}"
    if table.fit or table.reading is not None:
        raise ConfigError(f"{where} has fit or reading but no log; they say how a log is read and fitted")
    level, units = ("rack", 1) if table.level == _WHOLE_JOB else (table.level, table.units)
    repair = Constant(0.0) if table.repair is None else _times(table.repair, f"repair of {where}")
    if table.count is None:
        if table.span_s is not None or table.units is not None:
            raise ConfigError(
                f"{where} has span_s or units but no count; they give the time and the number of units of a count"
            )
        return Source(level, _times(table, where), repair, table.age_s, table.stationary)
    if table.span_s is None or table.mean_s is not None:
        raise ConfigError(
            f"{where} has a count: it needs span_s, the time in which failures were counted, and no mean_s"
        )
    counted = Failures.of_count(
        table.count, span_s=table.span_s, units=units or cluster.units(level), level=level, repair=repair
    )
    return counted.sources[0]


def _times(table: TimesTable, where: str) -> Distribution:
    if table.mean_s is None:
        raise ConfigError(f"{where} needs mean_s, a count of failures and span_s, or a log; a repair needs mean_s")
    shape = {name: value for name in _SHAPES if (value := getattr(table, name)) is not None}
    try:
        return make_distribution(table.distribution, table.mean_s, **shape)
    except TypeError as error:
        takes = ", ".join(_TAKES.get(table.distribution, ())) or "nothing"
        raise ConfigError(
            f"{where}: besides mean_s, {table.distribution} takes {takes}; got {', '.join(shape) or 'nothing'}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


_SHAPES = ("shape", "sigma", "early_s", "early_shape", "wear_s", "wear_shape")
_TAKES = {
    "weibull": ("shape",),
    "lognormal": ("sigma",),
    "bathtub": ("early_s", "wear_s", "early_shape (if not 0.5)", "wear_shape (if not 5)"),
}


# -- error messages


def _first_complaint(error: ValidationError) -> str:
    """Return one line about the first error."""
    wrong = error.errors()[0]
    *path, key = wrong["loc"] or ("",)
    where = _place(path)
    match wrong["type"]:
        case "extra_forbidden":
            return f"{where} has no key {str(key)!r}{_near(path, str(key))}"
        case "missing":
            what = f"table [{key}]" if not path and key not in ("strategies",) else f"key {str(key)!r}"
            return f"{where} has no {what}, which is required"
        case "value_error":
            return str(wrong["ctx"]["error"]) if not wrong["loc"] else f"{_place(path)}: {wrong['ctx']['error']}"
        case _:
            what = wrong["msg"][0].lower() + wrong["msg"][1:]
            return f"{where}: {key}: {what}, got {_shown(wrong['input'])}"


def _place(path: Sequence[int | str]) -> str:
    """Return the name of a table as it is written in the file."""
    if not path:
        return "the file"
    table, *rest = path
    if not rest:
        return f"[{table}]"
    number, *inner = rest
    name = f"[[{table}]] number {int(number) + 1}" if isinstance(number, int) else f"[{table}.{number}]"
    return f"{name}, {inner[0]}" if inner else name


def _near(path: Sequence[int | str], key: str) -> str:
    """Return a hint with the nearest key, and the allowed keys."""
    from holdfast_lab.simulate.schema import TABLES

    table = next(str(part) for part in (*reversed(path), "") if isinstance(part, str))
    names = list(TABLES[table].model_fields)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (allowed: {', '.join(names)})"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
