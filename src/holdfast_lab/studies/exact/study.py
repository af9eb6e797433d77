"""The exactness study: cost and benefit of bit-identical training.

Step time, memory, and goodput after a kill are measured with real processes. With virtual workers, it measures the
spread of final results of one training with random failures, for each failure policy.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import Options, Task, check_parts, parts_left_out
from holdfast_lab.studies.exact.claims import hold_claims
from holdfast_lab.studies.exact.cost import NETWORKS, QUICK_NETWORK, cost_tasks, memory_tasks
from holdfast_lab.studies.exact.goodput import goodput_tasks
from holdfast_lab.studies.exact.page import sections
from holdfast_lab.studies.exact.spread import INSIDE, QUICK, READ, SpreadTraining, spread_tasks

COST, MEMORY, GOODPUT, SPREAD = ONLY = ("cost", "memory", "goodput", "spread")
_JOBS, _RUNS = 5, 30
_QUICK_JOBS, _QUICK_RUNS = 1, 6


class Exact:
    """The study; see the module's docstring."""

    name = "exact"
    title = "Exactness: its cost and benefit"
    paper = (
        "Holdfast's own guarantee of bit-identical results despite failures, compared with unordered all-reduce, DDP, "
        "and torchft's policy. No paper measured it"
    )
    intervals = (
        "95 % intervals: for ratios of step times, bootstrap over blocks in which all variants were timed; for jobs "
        "and standard deviations, bootstrap over runs; for shares, Wilson."
    )
    task_s, quick_task_s = 25.0, 8.0
    claims, page = staticmethod(hold_claims), staticmethod(sections)

    def settings(self, options: Options) -> dict[str, Any]:
        """See :meth:`Study.settings`."""
        _check(options)
        return {
            "quick": options.quick,
            "seed": options.seed,
            "only": list(options.only),
            "network": options.model,
            "data": options.data is not None,
            "jobs of a kind": _jobs(options),
            "runs of a training": _runs(options),
        }

    def tasks(self, options: Options) -> list[Task]:
        """See :meth:`Study.tasks`."""
        wanted = options.only or ONLY
        networks = [options.model] if options.model else [QUICK_NETWORK] if options.quick else list(NETWORKS)
        tasks: list[Task] = []
        if COST in wanted:
            tasks += cost_tasks(networks, options.seed, options.repetitions, quick=options.quick)
        if MEMORY in wanted:
            tasks += memory_tasks(networks, quick=options.quick)
        if GOODPUT in wanted:
            tasks += goodput_tasks(_jobs(options), options.seed, quick=options.quick)
        if SPREAD in wanted:
            tasks += spread_tasks(_trainings(options), _runs(options), options)
        return tasks

    def left_out(self, options: Options) -> list[str]:
        """See :meth:`Study.left_out`."""
        told = ["All-reduce between hosts: all workers share the memory of one host."]
        if not options.data:
            told.append(f"{', '.join(one.name for one in READ)}: give the directory of the dataset with --data.")
        told += parts_left_out(options.only, ONLY)
        if options.quick:
            told.append(
                "All but one network, two workers with one and four slices each, two ways to divide the work after a "
                "kill with one run each, and one short training."
            )
        return told


def _check(options: Options) -> None:
    """Check the options.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    check_parts(options.only, ONLY)
    if options.data is not None and not options.data.is_dir():
        raise ConfigError(f"--data must be an existing directory, got {str(options.data)!r}")
    if options.repetitions == 1:
        raise ConfigError("--repetitions must be at least 2 for the exactness study, got 1: a single run has no spread")
    if options.model not in ("", *NETWORKS):
        raise ConfigError(f"--network must be one of {', '.join(NETWORKS)}, got {options.model!r}")


def _jobs(options: Options) -> int:
    return options.repetitions or (_QUICK_JOBS if options.quick else _JOBS)


def _runs(options: Options) -> int:
    return options.repetitions or (_QUICK_RUNS if options.quick else _RUNS)


def _trainings(options: Options) -> list[SpreadTraining]:
    chosen = QUICK if options.quick else (*INSIDE, *(READ if options.data else ()))
    return [one for one in chosen if options.model in ("", one.network)]
