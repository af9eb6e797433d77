"""The schema of scenario files. Imports pydantic, so it is imported only when a file is read.

The schema defines no defaults that the simulator has: a missing key is not passed on.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from holdfast.errors import ConfigError
from holdfast_lab.simulate.units import parse_bytes, parse_seconds, parse_speed

EVERY = ("best", "young", "daly", "never")
"""Words for ``save_every``: found by search, by either formula, or no checkpoints."""


def _named(info: ValidationInfo) -> str:
    return info.field_name or "it"


def _seconds(value: object, info: ValidationInfo) -> float:
    return parse_seconds(value, _named(info))


def _bytes(value: object, info: ValidationInfo) -> float:
    return parse_bytes(value, _named(info))


def _speed(value: object, info: ValidationInfo) -> float:
    return parse_speed(value, _named(info))


def _every(value: object, info: ValidationInfo) -> int | float | str:
    """Return steps as an integer, a time as a float, a word unchanged."""
    if isinstance(value, str) and value not in EVERY:
        try:
            return float(parse_seconds(value, _named(info)))
        except ConfigError as error:
            raise ConfigError(
                f"save_every must be a number of steps, a time such as 20min, or one of {', '.join(EVERY)}; got "
                f"{value!r}"
            ) from error
    if isinstance(value, str) or (type(value) is int and value >= 0):
        return value
    raise ConfigError(
        f"save_every must be a number of steps, a time such as 20min, or one of {', '.join(EVERY)}; got {value!r}"
    )


def _pairs(value: object, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    """Return pairs of a number of members and seconds."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ConfigError(
            f"{_named(info)} must be pairs of members and seconds, such as [[4, '1s'], [8, '600ms']]; got {value!r}"
        )
    for members, _ in value:
        if type(members) is not int:
            raise ConfigError(f"{_named(info)} must begin each pair with a whole number of members, got {members!r}")
    return tuple((members, parse_seconds(seconds, _named(info))) for members, seconds in value)


Seconds = Annotated[float, BeforeValidator(_seconds)]
Bytes = Annotated[float, BeforeValidator(_bytes)]
Speed = Annotated[float, BeforeValidator(_speed)]
Every = Annotated[int | float | str, BeforeValidator(_every)]
Pairs = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_pairs)]


class SchemaTable(BaseModel):
    """A table of the file: unknown keys, and integers written as text, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def given(self, *leave_out: str) -> dict[str, Any]:
        """Return the keys that were written, except for ``leave_out``."""
        return {name: getattr(self, name) for name in self.model_fields_set if name not in leave_out}


class ClusterTable(SchemaTable):
    """The keys of :class:`holdfast_lab.simulate.Cluster`."""

    workers: int
    spares: int = 0
    workers_per_node: int = 1
    nodes_per_rack: int = 16


class Policies(SchemaTable):
    """The keys of :class:`holdfast_lab.simulate.SimulatedJob` that a job or one of the compared strategies may set."""

    save_every: Every = "best"
    min_workers: int = 1
    start_workers: int | None = None
    slices: int | None = None
    split: str = ""
    batch: str = ""
    buckets: int = 1
    model: str = ""
    reinit_from: str = ""
    overlap_optimizer: bool = False
    mirror_every: int = 0


class JobTable(Policies):
    """The job: ``steps``, or ``work_s`` as their undisturbed duration; ``horizon_s`` ends the simulation."""

    steps: int | None = None
    work_s: Seconds | None = None
    horizon_s: Seconds | None = None


class StrategyTable(Policies):
    """One of the compared settings; its keys override those of the job."""

    strategy: str
    name: str = ""
    spares: int | None = None


class CostsTable(SchemaTable):
    """The keys of :class:`holdfast_lab.simulate.Costs`.

    There are also keys for sizes and speeds that costs are derived from, and for a run in which they were measured.
    """

    from_report: str = ""
    step_s: Seconds | None = None
    state_bytes: Bytes | None = None
    write_bytes_per_s: Speed | None = None
    read_bytes_per_s: Speed | None = None
    snapshot_bytes_per_s: Speed | None = None
    slice_s: Seconds = 0.0
    straggle: float = 0.0
    sum_s: Seconds = 0.0
    sum_hop_s: Seconds = 0.0
    sum_bytes: Bytes = 0.0
    link_bytes_per_s: Speed = 0.0
    steps_s: Pairs = ()
    update_s: Seconds = 0.0
    copy_s: Seconds = 0.0
    undo_s: Seconds = 0.0
    detect_s: Seconds = 0.0
    regroup_s: Seconds = 0.0
    regroup_hop_s: Seconds = 0.0
    save_s: Seconds = 0.0
    save_background_s: Seconds = 0.0
    load_s: Seconds = 0.0
    restart_s: Seconds = 0.0
    rebuild_s: Seconds = 0.0
    rehome_s: Seconds = 0.0
    spawn_s: Seconds = 0.0
    rejoin_s: Seconds = 0.0
    stale_iterations: float = 0.0


class TimesTable(SchemaTable):
    """Times from a distribution, as in :func:`holdfast_lab.simulate.make_distribution`."""

    distribution: str = "exponential"
    mean_s: Seconds | None = None
    shape: float | None = None
    sigma: float | None = None
    early_s: Seconds | None = None
    early_shape: float | None = None
    wear_s: Seconds | None = None
    wear_shape: float | None = None


def _repair(value: object) -> object:
    """Accept a plain time as a constant distribution."""
    return value if isinstance(value, dict) else {"distribution": "constant", "mean_s": value}


class SourceTable(TimesTable):
    """The keys of :class:`holdfast_lab.simulate.Source`.

    In place of a mean there may be a count of failures, with the number of units and the time, or a log that a
    distribution is fitted to.
    """

    level: str = "node"
    age_s: Seconds = 0.0
    stationary: bool = False
    repair: Annotated[TimesTable | None, BeforeValidator(_repair)] = None
    count: int | None = None
    span_s: Seconds | None = None
    units: int | None = None
    log: str = ""
    fit: str = ""
    reading: dict[str, Any] | None = None


class TraceTable(SchemaTable):
    """The arguments of :func:`holdfast_lab.simulate.read_trace`."""

    path: str
    kind: str
    level: str = "node"
    replayed: bool = False
    span_s: Seconds | None = None
    units: int | None = None
    system: int | None = None
    room: int | None = None
    repair_s: Seconds | None = None
    nodes_per_rack: int | None = None
    reading: dict[str, Any] | None = None


def _strategies(value: object) -> object:
    """Accept a name in place of a table with only that name."""
    if not isinstance(value, list):
        return value
    return [{"strategy": one} if isinstance(one, str) else one for one in value]


class ScenarioSchema(SchemaTable):
    """The whole file."""

    title: str = ""
    repetitions: int = Field(default=100, ge=2, le=1_000_000)
    seed: int = Field(default=0, ge=0)
    cluster: ClusterTable
    job: JobTable
    costs: CostsTable
    failures: list[SourceTable] | None = None
    trace: TraceTable | None = None
    strategies: Annotated[list[StrategyTable], BeforeValidator(_strategies)] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_one_reason(self) -> ScenarioSchema:
        if (self.failures is None) == (self.trace is None):
            raise ConfigError(
                "there must be either [[failures]] or [trace], which say what fails and when; write failures = [] if "
                "nothing fails"
            )
        return self


TABLES: dict[str, type[SchemaTable]] = {
    "": ScenarioSchema,
    "cluster": ClusterTable,
    "job": JobTable,
    "costs": CostsTable,
    "failures": SourceTable,
    "repair": TimesTable,
    "trace": TraceTable,
    "strategies": StrategyTable,
}
"""The model of each table, by name."""
