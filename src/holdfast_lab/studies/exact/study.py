"""The exactness study: cost and benefit of bit-identical training.

Step time, memory, and goodput after a kill are measured with real processes. With virtual workers, it measures the
spread of final results of one training with random failures, for each failure policy.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import Options, Study, Task, check_data, check_parts, parts_left_out
from holdfast_lab.studies.exact.claims import hold_claims
from holdfast_lab.studies.exact.cost import NETWORKS, QUICK_NETWORK, cost_tasks, memory_tasks
from holdfast_lab.studies.exact.goodput import goodput_tasks
from holdfast_lab.studies.exact.page import sections
from holdfast_lab.studies.exact.spread import INSIDE, QUICK, READ, SpreadTraining, spread_tasks

COST, MEMORY, GOODPUT, SPREAD = ONLY = ("cost", "memory", "goodput", "spread")
_JOBS, _RUNS = 5, 30
_QUICK_JOBS, _QUICK_RUNS = 1, 6


class _Plan:
    def __init__(self, options: Options) -> None:
        check_parts(options.only, ONLY)
        check_data(options.data)
        if options.repetitions == 1:
            raise ConfigError(
                "--repetitions must be at least 2 for the exactness study, got 1: a single run has no spread"
            )
        check_parts([options.model] if options.model else [], NETWORKS, "--network")
        self._options = options
        self._jobs = options.repetitions or (_QUICK_JOBS if options.quick else _JOBS)
        self._runs = options.repetitions or (_QUICK_RUNS if options.quick else _RUNS)

    def settings(self) -> dict[str, Any]:
        return {
            "only": list(self._options.only),
            "network": self._options.model,
            "data": self._options.data is not None,
            "jobs of a kind": self._jobs,
            "runs of a training": self._runs,
        }

    def tasks(self) -> list[Task]:
        wanted = self._options.only or ONLY
        networks = (
            [self._options.model] if self._options.model else [QUICK_NETWORK] if self._options.quick else list(NETWORKS)
        )
        tasks: list[Task] = []
        if COST in wanted:
            tasks += cost_tasks(networks, self._options.seed, self._options.repetitions, quick=self._options.quick)
        if MEMORY in wanted:
            tasks += memory_tasks(networks, quick=self._options.quick)
        if GOODPUT in wanted:
            tasks += goodput_tasks(self._jobs, self._options.seed, quick=self._options.quick)
        if SPREAD in wanted:
            tasks += spread_tasks(self._trainings(), self._runs, self._options)
        return tasks

    def left_out(self) -> list[str]:
        told = ["All-reduce between hosts: all workers share the memory of one host."]
        if not self._options.data:
            told.append(f"{', '.join(one.name for one in READ)}: give the directory of the dataset with --data.")
        told += parts_left_out(self._options.only, ONLY)
        if self._options.quick:
            told.append(
                "All but one network, two workers with one and four slices each, two ways to divide the work after a "
                "kill with one run each, and one short training."
            )
        return told

    def _trainings(self) -> list[SpreadTraining]:
        chosen = QUICK if self._options.quick else (*INSIDE, *(READ if self._options.data else ()))
        return [one for one in chosen if self._options.model in ("", one.network)]


STUDY = Study(
    name="exact",
    title="Exactness: its cost and benefit",
    paper=(
        "Holdfast's own guarantee of bit-identical results despite failures, compared with unordered all-reduce, DDP, "
        "and torchft's policy. No paper measured it"
    ),
    intervals=(
        "95 % intervals: for ratios of step times, bootstrap over blocks in which all variants were timed; for jobs "
        "and standard deviations, bootstrap over runs; for shares, Wilson."
    ),
    task_s=25.0,
    quick_task_s=8.0,
    plan=_Plan,
    claims=hold_claims,
    page=sections,
)
