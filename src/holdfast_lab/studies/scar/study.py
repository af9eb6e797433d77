"""Partial recovery and priority checkpoints: the experiments of Qiao et al. (2019), with this code.

Failures are simulated in the process that iterates, so that every policy gets the same run, the same failure and the
same randomness after it. Trials run in parallel, one process per core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.studies.base import (
    MEASURED,
    NOT_RUN,
    Claim,
    EarlierPartFailed,
    Options,
    Row,
    Study,
    Task,
    check_data,
    decided_by,
)
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.scar.claims import hold_claims
from holdfast_lab.studies.scar.live import live_claims, live_tasks
from holdfast_lab.studies.scar.page import sections
from holdfast_lab.studies.scar.perturbation_each import kind_rows
from holdfast_lab.studies.scar.perturbation_rows import cost_rows
from holdfast_lab.studies.scar.pilot import ProgramCannotRun, at_rate, pilot, with_levels
from holdfast_lab.studies.scar.programs import ENTRIES, NOT_READ, REPLACED, ProgramEntry, make, policies_of
from holdfast_lab.studies.scar.rows import AT_BEST
from holdfast_lab.studies.scar.save import held_claims, held_tasks
from holdfast_lab.studies.scar.trials import Policies, ProgramRun, trial, trial_of_several
from holdfast_lab.workloads.data.base import DataMissing

_TRIALS = 100
"""Number of trials over all failures, and of trials with a failure after the first full save."""
_QUICK = "mlr-digits"
_TIMES_THE_RATE = (1 / 4, 1 / 2, 1, 2, 4, 8, 16)
_REHEARSED = 24
_CHUNK = 25
"""Trials of a task: the most that an interruption loses."""
_SEVERAL = (2, 3)
_TRIED = 30
"""Trials of each kind of perturbation."""
_PARTS = 8
"""Number of parallel parts that the kinds of perturbations are divided into."""


class _Plan:
    """The programs and tasks of a run of the study."""

    def __init__(self, options: Options) -> None:
        if options.model:
            raise ConfigError(
                f"--network cannot be used with this study, got {options.model!r}; choose programs with --only"
            )
        check_data(options.data)
        self._options = options
        self._workers = WorkerPool(preload=[__name__])
        self.entries = self._chosen()
        self.trials = options.repetitions or _TRIALS

    def _chosen(self) -> list[ProgramEntry]:
        wanted, known = self._options.only, {entry.name: entry for entry in ENTRIES}
        for name in wanted:
            if name not in known:
                names = ", ".join(f"'{each}'" if " " in each else each for each in known)
                raise ConfigError(f"--only must be one of {names}, got {name!r}")
            if known[name].from_files and self._options.data is None:
                raise ConfigError(f"{name} needs data from files: give their directory with --data DIR")
        if wanted:
            return [entry for entry in ENTRIES if entry.name in wanted]
        if self._options.quick:
            return [known[_QUICK]]
        has_files = self._options.data is not None
        return [
            entry
            for entry in ENTRIES
            if (has_files or not entry.from_files)
            and not (has_files and entry.name in REPLACED)
            and not entry.by_request
        ]

    def left_out(self) -> list[str]:
        missing = [entry for entry in ENTRIES if entry not in self.entries]
        requested = [entry.name for entry in missing if entry.by_request]
        others = [entry.name for entry in missing if not entry.by_request]
        told = [f"Programs: {', '.join(others)}."] if others else []
        if requested:
            told.append(f"Programs that run only on request: {', '.join(requested)}; run each with --only.")
        if self._options.data is None:
            told.append(
                "All data from files (Fashion-MNIST, CoverType, MovieLens, Reuters): give their directory with --data."
            )
        told.append(NOT_READ)
        if self._options.quick:
            told.append(
                "Everything except the traditional policy, partial recovery and r = 1/8 with half of the blocks lost: "
                "other shares and fractions, perturbations, several failures, and policies beyond the paper."
            )
        return told

    def settings(self) -> dict[str, Any]:
        return {
            "programs": [entry.name for entry in self.entries],
            "trials": self.trials,
            "all saved once in": [f"{entry.every} iterations" for entry in self.entries],
            "loss averaged over": [f"{entry.window} iterations" for entry in self.entries],
            "options": [f"{name} = {value}" for entry in self.entries for name, value in entry.options],
            "data": "those that need no files" if self._options.data is None else f"files in {self._options.data}",
        }

    def tasks(self) -> list[Task]:
        tasks = []
        for entry in self.entries:
            course = self._course(entry, entry.name)
            tasks += [Task(f"pilot: {entry.name}", partial(self._pilot, course))]
            if self._options.quick:
                tasks += self._of_main(course, partial(policies_of, "quick", entry.fractions))
            else:
                tasks += self._of_program(entry, course)
        if not self._options.quick and not self._options.only:
            tasks += live_tasks(self._options.seed)
            tasks += held_tasks(self._workers, self._options.seed)
        return tasks

    def _of_program(self, entry: ProgramEntry, course: ProgramRun) -> list[Task]:
        """Return the tasks of a program in the whole study."""
        rehearsed = min(_REHEARSED, self.trials)
        whole, few = (partial(policies_of, which, entry.fractions) for which in ("whole", "few"))
        tasks = self._of_main(course, whole)
        tasks += self._of_trials(course, "rehearsal", rehearsed, few)
        if entry.fails_often:
            tasks += [
                Task(f"{failures} failures: {entry.name}", partial(self._several, course, failures, self.trials))
                for failures in _SEVERAL
            ]
        if entry.perturbed:
            tasks += [
                Task(f"perturbations: {entry.name}", partial(self._perturbed, course, entry.perturbed)),
                Task(f"kinds of perturbations: {entry.name}", partial(self._perturbed_by_kind, course)),
            ]
        if entry.has_rate:
            best = self._course(entry, f"{entry.name}{AT_BEST}")
            tasks += [
                Task(f"rates: {entry.name}", partial(self._rates, entry)),
                Task(f"pilot: {best.name}", partial(self._pilot, best)),
            ]
            tasks += self._of_main(best, few) + self._of_trials(best, "rehearsal", rehearsed, few)
        return tasks

    def _course(self, entry: ProgramEntry, name: str) -> ProgramRun:
        return ProgramRun(
            name=name,
            make=partial(make, entry.program, self._options.data, entry.options),
            every=entry.every,
            window=entry.window,
            iterations=entry.iterations,
            seed=self._options.seed,
        )

    def _of_main(self, course: ProgramRun, policies: Policies) -> list[Task]:
        """Return the main trials over all failures, then the additional late trials."""
        return [task for kind in ("main", "late") for task in self._of_trials(course, kind, self.trials, policies)]

    def _of_trials(self, course: ProgramRun, kind: str, count: int, policies: Policies) -> list[Task]:
        return [
            Task(
                f"{kind}: {course.name}, trials {first} to {min(first + _CHUNK, count) - 1}",
                partial(self._trials, course, kind, range(first, min(first + _CHUNK, count)), policies),
            )
            for first in range(0, count, _CHUNK)
        ]

    # -- tasks

    def _pilot(self, course: ProgramRun, known: Sequence[Row]) -> list[Row]:
        try:
            return self._workers.rows(pilot, [_at_rate(course, known)])
        except (DataMissing, ProgramCannotRun) as error:
            return [{"part": "pilot", "status": NOT_RUN, "program": course.name, "why": str(error)}]

    def _trials(
        self, course: ProgramRun, kind: str, numbers: Sequence[int], policies: Policies, known: Sequence[Row]
    ) -> list[Row]:
        if (ready := _ready(course, known)) is None:
            return []
        if kind == "late":
            numbers = [number for number in numbers if number < self.trials - _late_of_main(course, known)]
        return self._workers.rows(partial(trial, ready, kind, policies=policies), numbers)

    def _several(self, course: ProgramRun, failures: int, count: int, known: Sequence[Row]) -> list[Row]:
        if (ready := _ready(course, known)) is None:
            return []
        policies = partial(policies_of, "several", ())
        return self._workers.rows(partial(trial_of_several, ready, policies=policies, failures=failures), range(count))

    def _perturbed(self, course: ProgramRun, count: int, _: Sequence[Row]) -> list[Row]:
        return self._workers.rows(partial(perturbed, course, self._options.seed), [count])

    def _perturbed_by_kind(self, course: ProgramRun, _: Sequence[Row]) -> list[Row]:
        trials = min(_TRIED, self.trials)
        return self._workers.rows(partial(perturbed_by_kind, course, self._options.seed, trials), range(_PARTS))

    def _rates(self, entry: ProgramEntry, _: Sequence[Row]) -> list[Row]:
        course = self._course(entry, entry.name)
        try:
            rows = self._workers.rows(partial(at_rate, course), _TIMES_THE_RATE)
        except (DataMissing, ProgramCannotRun) as error:
            return [{"part": "rate", "status": NOT_RUN, "program": entry.name, "why": str(error)}]
        least = min((row["loss"] for row in rows if row["loss"] is not None), default=None)
        if least is None:
            return [
                {
                    "part": "rate",
                    "status": NOT_RUN,
                    "program": entry.name,
                    "why": "the loss diverged at every learning rate",
                }
            ]
        return [row | {"best": row["loss"] == least} for row in rows]


def _claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    of_others = [*decided_by(["live"], live_claims(rows)), *decided_by(["held"], held_claims(rows))]
    return [*hold_claims(rows, seed), *of_others]


STUDY = Study(
    name="scar",
    title="Partial recovery and priority checkpoints",
    paper=(
        "A. Qiao, B. Aragam, B. Zhang, E. P. Xing: Fault tolerance in iterative-convergent machine learning, ICML "
        "2019, arXiv 1810.07354"
    ),
    intervals=(
        "95 % intervals: for iterations saved, bootstrap over the trials, paired by trial; a resample in which "
        "rollback to a full checkpoint costs nothing counts as beyond both ends. For a mean cost of perturbations, "
        "normal distribution. For a share of runs, Clopper-Pearson, above 1,000 runs the normal distribution."
    ),
    task_s=15.5,
    quick_task_s=6.7,
    plan=_Plan,
    claims=_claims,
    page=sections,
)


def _ready(course: ProgramRun, known: Sequence[Row]) -> ProgramRun | None:
    """Return the course with the results of its pilot, None if the pilot says that it cannot be run.

    Raises:
        EarlierPartFailed: if the pilot failed.
    """
    pilots = (row for row in known if row["part"] == "pilot" and row["program"] == course.name)
    if (found := next(pilots, None)) is None:
        raise EarlierPartFailed("its pilot failed")
    return with_levels(_at_rate(course, known), found) if found["status"] == MEASURED else None


def _late_of_main(course: ProgramRun, known: Sequence[Row]) -> int:
    """Return the number of main trials whose failure is after the first full save."""
    main = [row for row in known if row["part"] == "trial" and (row["program"], row["kind"]) == (course.name, "main")]
    return len({row["trial"] for row in main if row.get("late")})


def _at_rate(course: ProgramRun, known: Sequence[Row]) -> ProgramRun:
    """Return the course at the best learning rate if its name ends with :data:`AT_BEST`, else unchanged."""
    if not course.name.endswith(AT_BEST):
        return course
    name = course.name.removesuffix(AT_BEST)
    rates = [row["rate"] for row in known if row["part"] == "rate" and row["program"] == name and row.get("best")]
    if not any(row["part"] == "rate" and row["program"] == name for row in known):
        raise EarlierPartFailed("the sweep of learning rates failed")
    if not rates:
        raise ProgramCannotRun("no best learning rate is known, because the sweep of learning rates failed")
    return replace(course, make=partial(course.make, learning_rate=rates[0]))


def perturbed(course: ProgramRun, seed: int, count: int) -> list[Row]:
    """Return the cost of perturbations of a program by size."""
    return cost_rows(course.make(seed), count, seed, course.iterations, course.window)


def perturbed_by_kind(course: ProgramRun, seed: int, trials: int, part: int) -> list[Row]:
    """Return one of :data:`_PARTS` parts of the cost of each kind of perturbation."""
    return kind_rows(course.make(seed), trials, seed, course.iterations, course.window, part, _PARTS)
