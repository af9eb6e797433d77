"""Nicolae et al. 2022: the cost of failures in data-parallel training, in accuracy and time, by strategy and policy.

Accuracy is measured with up to 1,024 virtual workers (:mod:`holdfast_lab.virtual_ddp.training`) and compared with the
failure-free training of the same seed. Time comes from :mod:`holdfast_lab.simulate` with stated costs. Some points are
measured with real processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast_lab.simulate import Estimate
from holdfast_lab.studies.base import (
    MEASURED,
    Journal,
    Options,
    Row,
    Study,
    Task,
    check_data,
    check_parts,
    parts_left_out,
)
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.resilience.cases import INSIDE, QUICK, READ, WIDE, NetworkSpec, ResilienceCase, cases
from holdfast_lab.studies.resilience.claims import hold_claims, is_lossy
from holdfast_lab.studies.resilience.cost import STATED, costs_of, overhead
from holdfast_lab.studies.resilience.jobs import QUICK_REALS, REALS, compare, measure
from holdfast_lab.studies.resilience.modes import VARIANTS, compare_modes
from holdfast_lab.studies.resilience.page import sections
from holdfast_lab.studies.resilience.training import trials
from holdfast_lab.studies.resilience.updates import cross

SIMULATED, MODES, REAL = ONLY = ("simulated", "modes", "real")
_MODE_SEEDS, _QUICK_MODE_SEEDS = 30, 2
_REAL_RUNS = 5
_BLOCK = 6
"""Number of seeds of a task."""
_PLACES = 12
"""Decimal places to keep: further digits are rounding errors, neither a loss nor a gain of accuracy."""


class _Plan:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._networks = _networks(options)

    def settings(self) -> dict[str, Any]:
        return {
            "only": list(self._options.only),
            "network": self._options.model,
            "data": self._options.data is not None,
            "trainings a case": {network.name: _seeds(network, self._options) for network in self._networks},
            "stated costs, seconds": ", ".join(f"{name} {value:g}" for name, value in costs_of(STATED).items()),
        }

    def tasks(self) -> list[Task]:
        wanted = self._options.only or ONLY
        tasks: list[Task] = []
        if SIMULATED in wanted:
            for network in self._networks:
                tasks += _trainings(self._options, network)
        if MODES in wanted:
            seeds = list(
                range(self._options.repetitions or (_QUICK_MODE_SEEDS if self._options.quick else _MODE_SEEDS))
            )
            variants = list(VARIANTS)[-1:] if self._options.quick else list(VARIANTS)
            tasks += [Task(f"modes: {variant}", partial(_compare_modes, variant, seeds)) for variant in variants]
        if REAL in wanted:
            reals, runs = (QUICK_REALS, 1) if self._options.quick else (REALS, self._options.repetitions or _REAL_RUNS)
            for repetition in range(runs):
                for real in reals:
                    run = partial(_measure, real, self._options.seed, repetition)
                    tasks.append(Task(f"real: {real.name}, {repetition}", run))
            tasks.append(Task("real: all compared", partial(compare, seed=self._options.seed), derived=True))
        return tasks

    def left_out(self) -> list[str]:
        told: list[str] = []
        if not self._options.data:
            told.append(f"{_named(READ)}: give the directory of the datasets with --data.")
        if not self._options.quick and self._options.model not in [network.name for network in WIDE]:
            told.append(f"{_named(WIDE)}: take days on a CPU; select one with --data and --network.")
        told += parts_left_out(self._options.only, ONLY)
        if self._options.quick:
            told.append(
                "All but one network, two numbers of workers, failures at random moments, and one run of each real "
                "job; the comparison of all slices in one batch with slice by slice, except for the network with batch "
                "norm."
            )
        return told


def _networks(options: Options) -> list[NetworkSpec]:
    """Return the networks to train.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    check_parts(options.only, ONLY)
    check_data(options.data)
    if options.repetitions == 1:
        raise ConfigError(
            "--repetitions must be at least 2 for the resilience study, got 1: a single training run gives no interval"
        )
    chosen = QUICK if options.quick else (*INSIDE, *(READ if options.data else ()))
    if options.data and options.model and not options.quick:
        chosen += WIDE
    found = [network for network in chosen if options.model in ("", network.name)]
    if not found:
        names = ", ".join(network.name for network in chosen)
        raise ConfigError(
            f"--network must be one of {names}{'' if options.data else ' (more with --data)'}, got {options.model!r}"
        )
    return found


def _named(networks: Sequence[NetworkSpec]) -> str:
    return ", ".join(f"{network.name} on {network.dataset}" for network in networks)


def _seeds(network: NetworkSpec, options: Options) -> int:
    return options.repetitions or network.seeds


def _compare_modes(variant: str, seeds: list[int], _: Sequence[Row]) -> list[Row]:
    with WorkerPool(
        1, preload=[compare_modes.__module__]
    ) as workers:  # with one torch thread, like all training runs of the study
        return workers.rows(partial(compare_modes, seeds=seeds), [variant])


def _trainings(options: Options, network: NetworkSpec) -> Iterator[Task]:
    seeds = [options.seed * 10_000 + number for number in range(_seeds(network, options))]
    for start in range(0, len(seeds), _BLOCK):
        block = seeds[start : start + _BLOCK]
        key = f"trainings of {network.name}: seeds {block[0]} to {block[-1]}"
        yield Task(key, partial(_train, options, network, block))
    yield Task(f"summed up: {network.name}", partial(_sum_up, options, network, seeds))
    yield Task(f"updates: {network.name}", partial(_cross, options, network, seeds))


def _cross(options: Options, network: NetworkSpec, seeds: Sequence[int], _: Sequence[Row]) -> list[Row]:
    return cross(network, options.data, seeds, quick=options.quick)


def _measure(real: Any, seed: int, repetition: int, _: Sequence[Row]) -> list[Row]:
    return measure(real, seed, repetition)


def _train(options: Options, network: NetworkSpec, seeds: Sequence[int], _: Sequence[Row]) -> list[Row]:
    """Train every case with some seeds, one process per core; finished seeds are not repeated.

    The results of each training run go to a separate journal, because they are too many for the page.
    """
    tried, journal = cases(network, quick=options.quick), _journal(options, network)
    known = journal.read()
    missing = [seed for seed in seeds if str(seed) not in known]
    with WorkerPool(preload=[trials.__module__]) as workers:
        side = len(workers.free())
        for block in (missing[start : start + side] for start in range(0, len(missing), side)):
            begun_s = time.monotonic()
            found = workers.rows(partial(_trials, network, options, tried), block)
            for seed in block:
                rows = [row for row in found if row["seed"] == seed]
                journal.add(str(seed), rows, time.monotonic() - begun_s)
    return []


def _journal(options: Options, network: NetworkSpec) -> Journal:
    settings = {"seed": options.seed, "quick": options.quick}
    return Journal(options.out / "trials" / network.name, network.name, settings)


def _trials(network: NetworkSpec, options: Options, tried: list[ResilienceCase], seed: int) -> list[Row]:
    return [row | {"seed": seed} for row in trials(network, options.data, seed, tried)]


def _sum_up(options: Options, network: NetworkSpec, seeds: Sequence[int], _: Sequence[Row]) -> list[Row]:
    """Return a row for each case: its cost in accuracy and in time."""
    _train(options, network, seeds, ())
    known = _journal(options, network).read()
    by_case: dict[str, list[Row]] = {}
    for found in (row for seed in seeds for row in known[str(seed)]):
        by_case.setdefault(found["case"], []).append(found)
    about = {"network": network.name, "dataset": network.dataset, "status": MEASURED}
    accuracy = [row["accuracy"] for row in by_case[""]]
    undisturbed: Row = {
        "part": "undisturbed",
        "accuracy": statistics.fmean(accuracy),
        "spread": statistics.stdev(accuracy),
    }
    rows: list[Row] = [
        about | undisturbed | {"seeds": len(accuracy), "steps": network.steps, "batch_size": network.batch}
    ]
    for case in cases(network, quick=options.quick):
        mine = by_case[case.key]
        row: Row = {"part": "case", "case": case.key, **case.columns(), "seeds": len(mine)}
        for name, key in (("accuracy", "accuracy_loss"), ("loss", "loss_more"), ("distance", "distance")):
            row |= _estimate(key, [one[name] for one in mine])
        for name in ("lost", "redone", "steps"):
            row[name] = statistics.fmean(one[name] for one in mine)
        row["same"] = sum(one["same"] for one in mine)
        rows.append(about | row | overhead(case, network.steps, seeds))
    return [*rows, *_together(about, rows, by_case)]


def _together(about: Row, rows: Sequence[Row], by_case: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return the cost of forward over all cases; the cases share their seeds, so only the seeds are independent."""
    lossy = [by_case[row["case"]] for row in rows if row["part"] == "case" and is_lossy(row)]
    if not lossy:
        return []
    row: Row = {"part": "together", "cases": len(lossy), "seeds": len(lossy[0])}
    for name, key in (("accuracy", "accuracy_loss"), ("loss", "loss_more")):
        row |= _estimate(key, [statistics.fmean(one[name] for one in alike) for alike in zip(*lossy, strict=True)])
    return [about | row]


def _estimate(name: str, values: Sequence[float]) -> Row:
    mean, low, high, _ = Estimate.of(np.array(values))
    return {key: round(value, _PLACES) for key, value in ((name, mean), (f"{name}_low", low), (f"{name}_high", high))}


STUDY = Study(
    name="resilience",
    title="Low-overhead resilience for data-parallel training: accuracy against time",
    paper=(
        "B. Nicolae, T. Hobson, O. Yildiz, T. Peterka, D. Morozov, Towards low-overhead resilience for data parallel "
        "deep learning, CCGrid 2022"
    ),
    intervals=(
        "95 % intervals: for a case, and for all cases together, Student's t over paired seeds; for ratios of cases, "
        "bootstrap over the cases, which share their seeds; for real runs, bootstrap over the runs; for shares, Wilson."
    ),
    task_s=92.0,
    quick_task_s=6.0,
    plan=_Plan,
    claims=hold_claims,
    page=sections,
)
