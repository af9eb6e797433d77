"""Campaigns: many trials of many settings, run in parallel and written to one file, until outcome shares are precise.

A trial is a pure function of its cell's settings and its seed. The table is therefore the same in whatever process a
trial runs, in whatever order, and also if the campaign is killed and resumed. Only the parent writes the table, each
row as soon as it arrives. The set of trials does not depend on timing either: a cell's trials run in batches, and the
next batch starts only when all earlier trials are in and are not yet enough.

A trial that raises, or that kills its process, has the outcome TF (training failed). The cause of a process's death is
not visible from outside, so a trial whose process died is repeated as the first trial of a new process. It counts as
TF if the new process ends in the same way (same signal or exit status). An unrelated kill costs one repetition only.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import InternalError
from holdfast_lab.studies.campaign_plan import Campaign, Cell, StopRule, found_by, seed_of
from holdfast_lab.studies.campaign_table import COLUMNS, CampaignTable, as_json
from holdfast_lab.studies.explain import shares
from holdfast_lab.studies.outcomes import OUTCOMES, TF
from holdfast_lab.studies.pool import PoolWorker, TrialAnswer, WorkerPool

Say = Callable[[str], None]


def run_campaign(
    campaign: Campaign, path: Path, processes: int | None = None, say: Say = lambda _: None
) -> dict[str, str]:
    """Run the missing trials; after a kill at any moment, calling it again resumes the campaign.

    Ctrl-C and SIGTERM raise KeyboardInterrupt, after the processes have ended and every finished row is in the file.
    :func:`holdfast_lab.studies.campaign_table.read_rows` reads the rows.

    Args:
        campaign: The campaign.
        path: Path of its file.
        processes: Number of parallel processes, each with one torch thread; None: one per core.
        say: Called with each progress line.

    Returns:
        For each cell that could not be prepared, by name, the reason; they are tried again by the next call.

    Raises:
        ConfigError: if the file belongs to another campaign or cannot be used, or if two cells have the same name.
    """
    cells = campaign.checked_cells()
    with (
        _stopped_by_sigterm(),
        CampaignTable(path, campaign.settings(), {cell.name: cell.settings for cell in cells}) as table,
        WorkerPool(processes, preload=_modules(campaign.prepare, campaign.trial)) as workers,
    ):
        progress = [_Progress(cell, campaign.stop, table.outcomes(cell.name)) for cell in cells]
        return _Running(campaign, progress, table, say).run(workers)


def _modules(*functions: Callable[..., Any]) -> list[str]:
    names = {getattr(function, "__module__", "__main__") for function in functions}
    return sorted(names - {"__main__"})


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C; only in the main thread, because Python sets signal handlers only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


# -- in the worker processes


@dataclass(slots=True)
class _Warm:
    state: Any = None


_warm = _Warm()
"""The warm state of this process's current cell."""


def _warm_up(prepare: Callable[[Mapping[str, Any]], Any], settings: Mapping[str, Any]) -> None:
    _warm.state = None  # two states may not fit into memory
    _warm.state = prepare(settings)


def _make_trial(trial: Callable[[Any, int], Mapping[str, Any]], seed: int) -> tuple[dict[str, Any], float]:
    """Return the result of a trial and its duration in seconds."""
    begun_s = time.perf_counter()
    found = found_by(trial, _warm.state, seed)
    return found, time.perf_counter() - begun_s


# -- in the parent


class _Progress:
    """Progress of a cell.

    Args:
        cell: The cell.
        stop: Decides when the cell has enough trials.
        outcomes: Known outcomes, by trial number.
    """

    def __init__(self, cell: Cell, stop: StopRule, outcomes: Mapping[int, str]) -> None:
        self.cell, self._stop, self.outcomes = cell, stop, dict(outcomes)
        self.todo: deque[int] = deque()
        self.is_over = False
        self._end = 0
        self._go_on()

    def add(self, number: int, outcome: str) -> None:
        """Add the outcome of a trial."""
        self.outcomes[number] = outcome
        self._go_on()

    def _go_on(self) -> None:
        """Start the next batch once all earlier trials are in and are not yet enough."""
        while not self.is_over and all(number in self.outcomes for number in range(self._end)):
            if self._end and self._stop.is_enough([self.outcomes[number] for number in range(self._end)]):
                self.is_over = True
                return
            begin, self._end = self._end, min(self._end + self._stop.batch, self._stop.most)
            self.todo.extend(number for number in range(begin, self._end) if number not in self.outcomes)

    def summary(self) -> str:
        """Return the cell's outcome shares in words."""
        known = shares(self.outcomes.values()).items()
        said = ", ".join(f"{name} {s.share:.1%} [{s.low:.1%}, {s.high:.1%}]" for name, s in known if s.trials)
        return f"{self.cell.name}: {len(self.outcomes)} trials, {said}"


@dataclass(frozen=True, slots=True)
class _WarmUp:
    """The call that prepares a cell."""

    progress: _Progress


@dataclass(frozen=True, slots=True)
class _Trial:
    """The call that makes a trial."""

    progress: _Progress
    number: int


class _Running:
    """Hands trials to worker processes and collects their results until every cell has enough.

    Args:
        campaign: The campaign.
        progress: Progress of each cell.
        table: Table for the rows.
        say: Called with each progress line.
    """

    def __init__(self, campaign: Campaign, progress: Sequence[_Progress], table: CampaignTable, say: Say) -> None:
        self._campaign, self._progress, self._table, self._say = campaign, progress, table, say
        self._at: dict[PoolWorker, _Progress] = {}  # the cell that each worker is warm for
        self._again: dict[PoolWorker, _Trial] = {}  # trials whose process died, to be repeated first in the new process
        self._deaths: Counter[tuple[str, int | None, str]] = Counter()
        self._failed: set[str] = set()  # cells whose first failed training was reported
        self._broken: dict[str, str] = {}

    def run(self, workers: WorkerPool) -> dict[str, str]:
        if known := sum(len(progress.outcomes) for progress in self._progress):
            self._say(f"{known} trials are already in the file")
        while True:
            for worker in workers.free():
                self._give(worker)
            answers = workers.wait()
            if not answers:
                return self._broken
            for answer in answers:
                self._take(answer)

    def _give(self, worker: PoolWorker) -> None:
        """Give a worker a trial of its warm cell, or warm it for another cell; do nothing if no cell needs trials."""
        progress = self._at.get(worker)
        if progress is None or not self._is_open(progress):
            if (progress := self._next_cell(worker)) is None:
                return
            self._at[worker] = progress
            worker.give(_WarmUp(progress), None, _warm_up, self._campaign.prepare, progress.cell.settings)
        elif (call := self._next_trial(worker, progress)) is not None:
            seed = seed_of(self._campaign.seed, progress.cell.name, call.number)
            worker.give(call, self._campaign.limit_s, _make_trial, self._campaign.trial, seed)

    def _is_open(self, progress: _Progress) -> bool:
        return not progress.is_over and progress.cell.name not in self._broken

    def _next_cell(self, worker: PoolWorker) -> _Progress | None:
        """Return an open cell with few workers at it, so that most cells are prepared only once."""
        again = self._again.get(worker)
        if again is not None and self._is_open(again.progress):
            return again.progress
        self._again.pop(worker, None)
        crowd = Counter(id(progress) for progress in self._at.values())
        waiting = [progress for progress in self._progress if self._is_open(progress) and progress.todo]
        return min(waiting, key=lambda progress: crowd[id(progress)], default=None)

    def _next_trial(self, worker: PoolWorker, progress: _Progress) -> _Trial | None:
        if worker in self._again:
            return self._again.pop(worker)
        return _Trial(progress, progress.todo.popleft()) if progress.todo else None

    def _take(self, answer: TrialAnswer) -> None:
        if answer.ended:
            del self._at[answer.worker]
        match answer.key:
            case _WarmUp(progress=progress):
                self._take_warm_up(progress.cell.name, answer)
            case _Trial() as call if answer.ended:
                self._take_death(call, answer)
            case _Trial() as call:
                if answer.error is not None:
                    raise answer.error  # our own error: errors of the trial itself are recorded as its outcome
                self._add(call, *answer.value)

    def _take_warm_up(self, cell: str, answer: TrialAnswer) -> None:
        if answer.error is not None:
            self._break(cell, f"{type(answer.error).__name__}: {answer.error}")
        elif answer.ended and self._died_again(cell, None, answer.ended):
            self._break(cell, f"the process that prepared it died twice ({answer.ended})")

    def _break(self, cell: str, why: str) -> None:
        self._broken[cell] = why
        self._say(f"{cell}: cannot be prepared: {why}")

    def _died_again(self, cell: str, number: int | None, ended: str) -> bool:
        self._deaths[cell, number, ended] += 1
        return self._deaths[cell, number, ended] > 1

    def _take_death(self, call: _Trial, answer: TrialAnswer) -> None:
        cell = call.progress.cell.name
        self._say(f"{cell}: the process of trial {call.number} died ({answer.ended})")
        if self._died_again(cell, call.number, answer.ended):
            self._add(call, {"outcome": TF, "error": f"the process died twice: {answer.ended}"}, 0.0)
        else:
            self._again[answer.worker] = call

    def _add(self, call: _Trial, found: dict[str, Any], seconds: float) -> None:
        cell, number = call.progress.cell, call.number
        outcome = found.pop("outcome", None)
        if outcome not in OUTCOMES:
            raise InternalError(
                f"the outcome of a trial must be one of {', '.join(OUTCOMES)}, cell {cell.name!r} gave {outcome!r}"
            )
        if taken := found.keys() & {*COLUMNS, *cell.settings}:
            raise InternalError(
                f"trials of cell {cell.name!r} return names that the table uses itself: {', '.join(sorted(taken))}"
            )
        self._table.add(
            cell.name, number, seed_of(self._campaign.seed, cell.name, number), outcome, as_json(found), seconds
        )
        if outcome == TF and cell.name not in self._failed:
            self._failed.add(cell.name)
            self._say(f"{cell.name}: training failed in trial {number}: {found.get('error', '')}")
        call.progress.add(number, outcome)
        if call.progress.is_over:
            self._say(call.progress.summary())
