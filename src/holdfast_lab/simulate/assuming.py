"""The inputs of a plan: given in options, measured in a run, or assumed by a default that the plan reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import check_choice, check_mtbf, check_range
from holdfast_lab.simulate.costs import OF_STORAGE, SAVING, STALE_SHARE, STALE_SOURCE
from holdfast_lab.simulate.distributions import Distribution
from holdfast_lab.simulate.job import MODELS
from holdfast_lab.simulate.measured import MeasuredRun
from holdfast_lab.simulate.spare_worth import SPLITS, worthwhile_spares
from holdfast_lab.simulate.units import DAY_S

_BIG_JOB = 16
"""From this many workers on, nodes are assumed to have eight workers each."""
_BIG_STATE = 80e9
"""Memory of one of today's accelerators, bytes: a larger state is assumed to be split."""
WHOLE_JOB_SHARE = 63 / 419
"""Of Llama 3's 419 unexpected interruptions, software bugs (54), dependencies (2) and NCCL's watchdog (7) end a job
regardless of survivors (The Llama 3 Herd of Models, 2024, table 5).
"""

LLAMA = {"failures": 419, "days": 54, "workers": 16_384, "nodes": 2_048}
"""The same table, as a reference for other failure rates."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One number, and its source.

    Args:
        name: As in :class:`PlanQuestion`.
        value: Seconds, bytes, or a plain number or word.
        source: ``"given"``, ``"measured"``, ``"fitted"`` (to a log), ``"derived"`` (from others) or ``"assumed"``.
        why: The run it was measured in, the fit, or the values or reference it was derived or taken from.
    """

    name: str
    value: Any
    source: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class FittedRate:
    """A lifetime that was fitted to a log, in place of a mean time between failures.

    Args:
        name: Which mean: ``"mtbf_s"``, ``"mtbf_node_s"`` or ``"mtbf_worker_s"``.
        lifetime: Its distribution.
        why: The fit in a few words.
    """

    name: str
    lifetime: Distribution
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """The job that a plan is made for. Times in seconds.

    Args:
        workers: Active workers, spares not included.
        workers_per_node: Workers of one node; they fail together.
        mtbf_node_s: Mean time between failures of one node.
        whole_job_share: Share of failures that no strategy survives; the launcher restarts the job.
        repair_s: Mean time until a failed node is back.
        spares: Spare workers, in addition to ``workers``.
        step_s: Duration of a step with all workers.
        save_s: How long a checkpoint holds training.
        save_background_s: How long it is then written in the background.
        load_s: Time for all workers to load a checkpoint.
        restart_s: Time for the launcher to start the job: processes, libraries, the model.
        detect_s: Time until all survivors have detected a failure.
        regroup_s: Time until they have agreed on the recovery.
        rejoin_s: How long training is held for state transfer to newcomers.
        rebuild_s: Time for ``reinit`` to rebuild the application.
        rehome_s: Time to move parts of a split model to other workers.
        model: One of :data:`~holdfast_lab.simulate.scenario.MODELS`.
        split: ``"slices"`` or ``"even"``.
        work_s: Duration of the training without disturbance.
        lifetime: The distribution of a node's lifetime, stretched to ``mtbf_node_s``; None: exponential.
        mirror_every, stale_iterations: As in :class:`~holdfast_lab.simulate.job.SimulatedJob` and
            :class:`~holdfast_lab.simulate.costs.Costs`, for a split model.
    """

    workers: int
    workers_per_node: int
    mtbf_node_s: float
    whole_job_share: float
    repair_s: float
    spares: int
    step_s: float
    save_s: float
    save_background_s: float
    load_s: float
    restart_s: float
    detect_s: float
    regroup_s: float
    rejoin_s: float
    rebuild_s: float
    rehome_s: float
    model: str
    split: str
    work_s: float
    lifetime: Distribution | None = None
    mirror_every: int = 16
    stale_iterations: float = 0.0

    @property
    def nodes(self) -> int:
        """Number of nodes, without those of spares."""
        return -(-self.workers // self.workers_per_node)

    @property
    def down_share(self) -> float:
        """Share of the time in which a node is being repaired."""
        return down_share(self.mtbf_node_s, self.repair_s, self.whole_job_share)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job; failures of spares are not counted."""
        return self.mtbf_node_s / self.nodes


def ask(
    given: Mapping[str, Any], run: MeasuredRun | None = None, fitted: FittedRate | None = None
) -> tuple[PlanQuestion, list[Assumption]]:
    """Fill in every value of the question that is not given, and return the question and the source of each number.

    Args:
        given: Known values, by the names of :class:`PlanQuestion`; in addition one of ``mtbf_s`` (of the whole job) and
            ``mtbf_worker_s``, and ``state_bytes``, ``write_bytes_per_s``, ``read_bytes_per_s``,
            ``snapshot_bytes_per_s``.
        run: A run whose measured costs are used where nothing is given.
        fitted: A lifetime that was fitted to a log, instead of a mean among the given values.

    Raises:
        ConfigError: if no failure rate is given, or a number is out of range.
    """
    facts = _Facts(given, run, fitted)
    workers = facts.take("workers", lambda: _needs_workers(run), "the workers of that run", measured=True)
    check_range("--workers", workers, 1, most=1_000_000)
    small = workers < _BIG_JOB
    why = "fewer than 16 workers: each fails alone" if small else "nodes of eight workers"
    per_node = facts.take("workers_per_node", lambda: 1 if small else 8, why)
    check_range("--workers-per-node", per_node, 1, most=workers)
    mtbf_node_s = _mtbf_node_s(facts, workers, per_node)
    share = facts.take(
        "whole_job_share", lambda: WHOLE_JOB_SHARE, "software bugs and similar causes among Llama 3's interruptions"
    )
    check_range("--whole-job-share", share, 0, most=1)
    repair_s = facts.take("repair_s", lambda: 6 * 3600.0, "mean of LANL's 23,739 outages, 1996 to 2005")
    split = facts.take("split", lambda: "slices", "whole slices are reassigned, which keeps the bits")
    check_choice("--split", split, SPLITS)
    down = down_share(mtbf_node_s, repair_s, share)
    spares = facts.take(
        "spares", lambda: worthwhile_spares(workers, per_node, down, split), _why_spares(workers, per_node, down, split)
    )
    check_range("--spares", spares, 0, most=1_000_000)
    storage = _storage(facts, workers, per_node)
    partial = _partial(facts, storage["model"])
    question = PlanQuestion(
        workers=workers, workers_per_node=per_node, mtbf_node_s=mtbf_node_s, whole_job_share=share, repair_s=repair_s, spares=spares,
        step_s=facts.take("step_s", lambda: 5.0, "typical of a large language model"),
        restart_s=facts.take("restart_s", lambda: 300.0, "processes, libraries, communicators, the model"),
        detect_s=facts.take("detect_s", lambda: 10.0, "the default of --node-timeout, for a node that does not respond"),
        regroup_s=facts.take("regroup_s", lambda: 1.0, "measured: 0.03 s with 64 workers; unknown for many more"),
        rejoin_s=facts.take("rejoin_s", lambda: 10.0, "newcomers receive the state from other workers' memory"),
        rebuild_s=facts.take("rebuild_s", lambda: 60.0, "reinit: the script rebuilds its model and data"),
        rehome_s=facts.take("rehome_s", lambda: 10.0, "parts of a split model are sent from memory to memory"),
        split=split,
        work_s=facts.take("work_s", lambda: 30 * DAY_S, "a month of training"),
        lifetime=_node_lifetime(fitted, per_node),
        **storage, **partial,
    )  # fmt: skip
    _check(question)
    return question, facts.known


def down_share(mtbf_node_s: float, repair_s: float, whole_job_share: float) -> float:
    """Return the share of the time in which a node is being repaired.

    Failures that end the whole job, such as bugs, need no repair.
    """
    return (1 - whole_job_share) * repair_s / (mtbf_node_s + (1 - whole_job_share) * repair_s)


class _Facts:
    """Looks up each number in its possible sources, and records which source was used."""

    def __init__(self, given: Mapping[str, Any], run: MeasuredRun | None, rate: FittedRate | None) -> None:
        self._given = {name: value for name, value in given.items() if value is not None}
        self._rate = rate
        if rate is not None:
            self._given[rate.name] = rate.lifetime.mean_s
        self._run = run
        self._measured = {} if run is None else dict(run.costs)
        if not self._given.keys().isdisjoint(OF_STORAGE):  # the measured values are for another size or another disk
            self._measured = {name: one for name, one in self._measured.items() if name not in SAVING}
        self.known: list[Assumption] = []

    def has(self, name: str) -> bool:
        """Return whether it is given or measured."""
        return name in self._given or name in self._measured

    def is_measured(self, name: str) -> bool:
        """Return whether the measured value is used."""
        return name not in self._given and self.has(name)

    def given(self, name: str) -> Any:
        """Return and record the given value; None if there is none."""
        return self.take(name, lambda: None, "") if name in self._given else None

    def take(
        self, name: str, default: Callable[[], Any], why: str, *, source: str = "assumed", measured: bool = False
    ) -> Any:
        """Return the given number, else the measured one, else the default."""
        if self._rate is not None and name == self._rate.name:
            self.known.append(Assumption(name, self._given[name], "fitted", self._rate.why))
        elif name in self._given:
            self.known.append(Assumption(name, self._given[name], "given"))
        elif self._run is not None and name in self._measured:
            found = self._measured[name]
            self.known.append(Assumption(name, found.value, "measured", f"{found.how}, {self._run.workers} workers"))
        else:
            self.known.append(Assumption(name, default(), "measured" if measured else source, why))
        return self.known[-1].value


def _needs_workers(run: MeasuredRun | None) -> int:
    if run is None:
        raise ConfigError("--workers is missing: give the number of active workers")
    return run.workers


def _mtbf_node_s(facts: _Facts, workers: int, per_node: int) -> float:
    names = ("mtbf_s", "mtbf_node_s", "mtbf_worker_s")
    found = [(name, value) for name in names if (value := facts.given(name)) is not None]
    if len(found) != 1:
        options = "--mtbf (of the whole job), --mtbf-node (of one node), --mtbf-worker (of one worker)"
        hint = "; if unknown, start with --mtbf-node 264d, the rate of Llama 3" if not found else ""
        raise ConfigError(f"give one of {options}{hint}")
    name, value = found[0]
    check_range(f"--{name.removesuffix('_s').replace('_', '-')}", value, 0, above=True)
    scale = {"mtbf_s": -(-workers // per_node), "mtbf_node_s": 1, "mtbf_worker_s": 1 / per_node}[name]
    return float(value) * scale


def _node_lifetime(rate: FittedRate | None, per_node: int) -> Distribution | None:
    """Return the lifetime of a node from that of a log's machines; None if they are something else.

    The first failure of several workers, or the failures of many nodes, have no lifetime of the same family: only the
    mean is used.
    """
    if rate is None or rate.name == "mtbf_s" or (rate.name == "mtbf_worker_s" and per_node > 1):
        return None
    return rate.lifetime


def _why_spares(workers: int, per_node: int, down: float, split: str) -> str:
    nodes = -(-workers // per_node)
    if down == 0:
        return "none: a failed worker is replaced immediately"
    if spares := worthwhile_spares(workers, per_node, down, split):
        away = (nodes + spares // per_node) * down
        return f"on average {away:,.2f} nodes are down; these give the most work per worker-hour"
    return f"none: on average {nodes * down:,.2f} nodes are down; no number of spares gives more work per worker-hour"


def _partial(facts: _Facts, model: str) -> dict[str, Any]:
    """Return the interval and the price of outdated copies, which only ``partial`` with a split model has."""
    if model != "split":
        if odd := [name for name in ("mirror_every", "stale_iterations") if facts.has(name)]:
            raise ConfigError(
                f"--{odd[0].replace('_', '-')} is about the copies of a model that is split, got --model {model}: leave "
                "it out, or give --model split"
            )
        return {}
    every = facts.take("mirror_every", lambda: 16, "as in holdfast study scar")
    if every == 1:
        raise ConfigError("--mirror-every 1 keeps exact copies of every part: that is --model mirrored")
    check_range("--mirror-every", every, 2, most=10**9)
    stale = facts.take("stale_iterations", lambda: STALE_SHARE * every, STALE_SOURCE, source="derived")
    check_range("--stale-iterations", stale, 0, most=10**9)
    return {"mirror_every": every, "stale_iterations": stale}


def _storage(facts: _Facts, workers: int, per_node: int) -> dict[str, Any]:
    """Return the costs of checkpoints, and how the model is held."""
    write_s: float | None = None
    if not (facts.has("save_s") and facts.has("load_s")) or facts.has("state_bytes"):
        state = facts.take(
            "state_bytes",
            lambda: min(1e9 * workers, 1e12),
            "1 GB per worker, at most 1 TB: 70 billion parameters with Adam",
        )
        check_range("--state-bytes", state, 0, above=True)
    else:
        state = 0.0
    if not (facts.has("save_s") and facts.has("load_s")) or facts.has("write_bytes_per_s"):
        nodes = -(-workers // per_node)
        write = facts.take(
            "write_bytes_per_s", lambda: min(1e9 * nodes, 1e11), "1 GB/s per node, at most 100 GB/s in total"
        )
        check_range("--write-bytes-per-s", write, 0, above=True)
        write_s = state / write
    read = facts.given("read_bytes_per_s")
    snapshot = facts.given("snapshot_bytes_per_s")
    for name, speed in (("--read-bytes-per-s", read), ("--snapshot-bytes-per-s", snapshot)):
        if speed is not None:
            check_range(name, speed, 0, above=True)
    held_s = write_s if snapshot is None else state / snapshot
    is_beside = snapshot is not None or facts.is_measured("save_s")  # Holdfast writes in the background
    why = "training is held while the state is copied" if snapshot else "training is held while the state is written"
    big = state > _BIG_STATE
    return {
        "save_s": facts.take("save_s", lambda: held_s, why, source="derived"),
        "save_background_s": facts.take(
            "save_background_s",
            lambda: write_s if is_beside and write_s is not None else 0.0,
            "written in the background" if is_beside and write_s is not None else "nothing is written in the background",
            source="derived",
        ),
        "load_s": facts.take(
            "load_s", lambda: write_s if read is None else state / read,
            "read as fast as written" if read is None else "read by all", source="derived",
        ),
        "model": facts.take(
            "model", lambda: "mirrored" if big else "replicated",
            f"{state / 1e9:,.0f} GB {'exceed' if big else 'fit into'} one accelerator's memory" if state else "size unknown",
        ),
    }  # fmt: skip


def _check(question: PlanQuestion) -> None:
    check_choice("--model", question.model, MODELS)
    for name in ("step_s", "work_s"):
        check_range(f"--{name.replace('_', '-')}", getattr(question, name), 0, above=True)
    check_mtbf(question.mtbf_s)
