"""The sink of an experiment logger: passes each committed step on once, also after failures of what it logs to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from holdfast.observe.loggers.leftovers import RunRecords
from holdfast.observe.loggers.media import MediaFiles, MediaRecord, StepMedia, with_media
from holdfast.observe.loggers.steps import LoggedStep, StepOrder
from holdfast.records.paths import media_dir
from holdfast.records.queued import NotTaken
from holdfast.records.types import Finished, HistogramLogged, ImageLogged, Record, RunStarted, StepCommitted

EVERY_S = 1.0
"""Steps are written this often."""
GAP_S = 5.0
"""A step that is missing while later ones have arrived is looked for in the record files after this time."""
LAST_S = 30.0
"""The end of a job waits this long for a logger."""
MOST_UNWRITTEN = 1000
"""Steps that are written at once, and again after a failure; later ones wait in their order."""
_LONGEST_PAUSE_S = 60.0
_LONGEST_TEXT = 200
"""Characters of an error of another package that are shown."""


class StepLogger(Protocol):
    """Writes steps to one place. Only one thread calls it."""

    name: str
    shows: frozenset[str]
    """Which of ``images`` and ``histograms`` it can show."""

    def open(self) -> Mapping[str, int]:
        """Open the log, or continue it; called again after :meth:`write` has failed.

        Returns:
            By metric, the last step that the log has of it, read from the log itself; "" stands for all metrics.
        """
        ...

    def write(self, steps: Sequence[LoggedStep]) -> None:
        """Write steps, in ascending order. If this process dies, the log may lack the last ones, but none before them."""
        ...

    def close(self, *, is_done: bool) -> None:
        """Close the log, if it is open; ``is_done``: the run has ended as planned, and will not be resumed."""
        ...


class LoggerSink:
    """A sink of records (:class:`~holdfast.records.queued.SlowSink`) for a :class:`StepLogger`.

    Args:
        logger: The logger.
        run: The records of this run, to look for steps that did not arrive: the queue may have been full.
        earlier: Those of earlier starts of the job, whose launcher may have been killed before it logged their steps.
        files: The files of images, which all loggers of the run read; None: of this one alone.
        say: Displays a line.
        now_s: Returns the time in seconds since a fixed moment.
    """

    def __init__(
        self,
        logger: StepLogger,
        run: RunRecords,
        earlier: Sequence[RunRecords] = (),
        files: MediaFiles | None = None,
        say: Callable[[str], None] = print,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.trouble = logger.name, f"steps are not logged to {logger.name}"
        self.pause_s = self.longest_s = EVERY_S
        self._logger, self._run, self._earlier, self._now_s = logger, run, earlier, now_s
        self._order = StepOrder()
        self._media = StepMedia(run.run_dir, files or MediaFiles(1))
        self._say = say
        self._unshown: Counter[str] = Counter()
        self._notices: set[str] = set()
        self._logged: dict[str, int] | None = None  # None: the log is not open
        self._unwritten: list[LoggedStep] = []
        self._first: int | None = None
        self._gap_s: float | None = None
        self._lost: list[int] = []
        self._finished: dict[int, Finished] = {}
        self._last: LoggedStep | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Log the steps among new records; NotTaken says why they have to wait, or are lost."""
        for record in records:
            match record:
                case RunStarted() if self._first is None:
                    self._first = record.step
                    if record.is_distributed:
                        self._say(f"{self.name} gets nothing: steps of a torch.distributed script have no metrics")
                case StepCommitted():
                    self._order.add(_as_logged(record, self._run))
                case ImageLogged() | HistogramLogged():
                    self._media.add(record)
                case Finished():
                    self._finished[record.rank] = record
        self._log()
        self._tell_lost()
        self._tell_unshown()

    def close(self, end_s: float) -> None:
        """Log what is left, and the metrics that the script logged after training; NotTaken says what is not logged."""
        if self._order.has_left_out:
            self._order.add_all(_steps_of(self._run))
        whys = []
        try:
            self._log(is_end=True)
            self._unwritten += self._final(end_s)
            self._write()
        except NotTaken as error:
            whys.append(str(error))
        try:
            self._logger.close(is_done=any(each.outcome == "done" for each in self._finished.values()))
        except Exception as error:  # as in _open; it must not hide how many steps are lost
            whys.append(f"the log was not closed: {_brief(error)}")
        if self._lost:
            whys.append(_without_record(self._lost))
        dropped = len(self._lost) + self.num_held + self._media.num_dropped
        if dropped or whys:
            raise NotTaken("; ".join(dict.fromkeys(whys)), dropped=dropped)

    @property
    def num_held(self) -> int:
        """Number of steps that were taken and are not logged."""
        return len(self._unwritten) + self._order.num_waiting

    # --- in order

    def _log(self, *, is_end: bool = False) -> None:
        """Write the steps that are next, as far as they have arrived.

        Raises:
            NotTaken: if they cannot be written yet, and are kept.
        """
        if self._logged is None:
            self._open()
        if not self._order.has_begun and (self._first is not None or is_end):
            self._begin()
        while True:
            self._take_next()
            self._search(is_end=is_end)
            self._write()
            if not self._order.has_next:
                return

    def _search(self, *, is_end: bool) -> None:
        """Look for steps that have been missing for some time, and give up those without a record."""
        if not self._order.missing:
            self._gap_s = None
            return
        if not is_end and len(self._unwritten) >= MOST_UNWRITTEN:
            return  # what would be found has no room
        self._gap_s = self._now_s() if self._gap_s is None else self._gap_s
        if not is_end and self._now_s() - self._gap_s < GAP_S and not self._order.has_left_out:
            return
        for run in (*self._earlier, self._run):
            self._order.add_all(_steps_of(run))
        self._take_next()
        while missing := self._order.missing:
            self._lost += missing
            self._order.skip_missing()
            self._take_next()
        self._gap_s = None

    def _take_next(self) -> None:
        room = max(0, MOST_UNWRITTEN - len(self._unwritten))
        self._unwritten += map(self._media.attach, self._order.take(room))

    def _begin(self) -> None:
        """Find the first step to log: after those that the log has, or that of the oldest record."""
        assert self._logged is not None
        last = max(self._logged.values(), default=-1)
        self._order.add_all((step for run in self._earlier for step in _steps_of(run)), are_first=True)
        steps = [*self._order.steps, *([] if self._first is None else [self._first])]
        if not steps:
            return
        if last < 0:
            self._order.begin(min(steps))
        else:  # the last step may lack some of its metrics, if its logger cannot write all of a step at once
            self._order.begin(last if min(steps) <= last else last + 1)

    # --- once

    def _open(self) -> None:
        try:
            self._logged = dict(self._logger.open())
        except Exception as error:  # of any package, about files, networks, credentials
            raise self._put_off(error) from error

    def _write(self) -> None:
        """Write the steps that wait, without what the log has of them."""
        if not self._unwritten:
            return
        assert self._logged is not None
        logged = self._logged
        steps = [step for each in self._unwritten if (step := self._shown(each.without(logged))).names]
        try:
            if steps:
                self._logger.write(steps)
        except Exception as error:  # as in _open
            self._logged = None  # it is not known what was written
            raise self._put_off(error) from error
        self.pause_s = EVERY_S
        for step in steps:
            logged.update(dict.fromkeys(step.names, step.step))
        for step in self._unwritten:
            self._media.done(step)
        self._last = self._unwritten[-1]
        self._unwritten = []

    def _shown(self, step: LoggedStep) -> LoggedStep:
        """Return a step without what the logger cannot show."""
        if step.images and "images" not in self._logger.shows:
            self._unshown["images"] += len(step.images)
            step = replace(step, images={})
        if step.histograms and "histograms" not in self._logger.shows:
            self._unshown["histograms"] += len(step.histograms)
            step = replace(step, histograms={})
        return step

    def _tell_lost(self) -> None:
        """Raise NotTaken with the number of steps that have no record, if there are new ones."""
        if lost := self._lost:
            self._lost = []
            raise NotTaken(_without_record(lost), dropped=len(lost))

    def _tell_unshown(self) -> None:
        """Count what the logger cannot show, and say so once.

        Raises:
            NotTaken: with its number.
        """
        if self._media.num_absent:
            self._unshown["images of workers on other nodes"] = self._media.num_absent
            self._media.num_absent = 0
        if self._media.num_dropped:
            self._unshown["images and histograms of steps that waited too long"] += self._media.num_dropped
            self._media.num_dropped = 0
        if dropped := sum(self._unshown.values()):
            for kind in sorted(set(self._unshown) - self._notices):
                self._say(f"{self.name} shows no {kind}: they are left out there")
            self._notices |= set(self._unshown)
            self._unshown.clear()
            raise NotTaken("", dropped=dropped)

    def _put_off(self, error: Exception) -> NotTaken:
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
        return NotTaken(_brief(error), dropped=0)

    def _final(self, end_s: float) -> list[LoggedStep]:
        """Return the metrics that the script logged after training, as part of the last step."""
        if not self._finished or self._logged is None:
            return []
        last = self._last
        number = max(self._logged.values(), default=-1) if last is None else last.step
        of_step = {} if last is None else last.metrics
        final_metrics = self._finished[min(self._finished)].metrics
        metrics = {name: value for name, value in final_metrics.items() if name not in of_step}
        return [LoggedStep(step=max(0, number), time_s=self._run.epoch_s + end_s, metrics=metrics, is_final=True)]


def _brief(error: Exception) -> str:
    """Return an error of another package in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_TEXT].rstrip(".")


def _without_record(lost: Sequence[int]) -> str:
    return f"{len(lost)} steps from step {lost[0]} on have no record"


def _as_logged(record: StepCommitted, run: RunRecords) -> LoggedStep:
    return LoggedStep(step=record.step, time_s=run.epoch_s + record.t_s, metrics=record.metrics)


def _steps_of(run: RunRecords) -> Iterator[LoggedStep]:
    """Yield the steps in record files, with their images and histograms."""
    media: dict[int, dict[str, MediaRecord]] = {}
    for record in run.read():
        if isinstance(record, ImageLogged | HistogramLogged):
            media.setdefault(record.step, {})[record.name] = record
        elif isinstance(record, StepCommitted):
            yield with_media(_as_logged(record, run), media.pop(record.step, {}).values(), media_dir(run.run_dir))
