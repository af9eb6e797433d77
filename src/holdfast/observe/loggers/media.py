"""Images and histograms on their way from the records to the loggers.

Their records are written before the step is committed, maybe more than once, and count once it is. An image is a file in
the run folder. It is removed when every logger is done with it, so that the folder does not grow with the run.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from holdfast.observe.loggers.steps import LoggedImage, LoggedStep
from holdfast.records.paths import media_dir
from holdfast.records.types import HistogramLogged, ImageLogged

MediaRecord = ImageLogged | HistogramLogged
MOST_WAITING = 500
"""Images and histograms that a logger keeps while their steps cannot be logged."""


class MediaFiles:
    """The files of the images of a run, which all of its loggers read.

    Args:
        num_loggers: How many loggers there are.
    """

    def __init__(self, num_loggers: int) -> None:
        self._num_loggers = num_loggers
        self._lock = threading.Lock()
        self._done: Counter[Path] = Counter()

    def release(self, path: Path) -> None:
        """One logger is done with a file."""
        with self._lock:
            self._done[path] += 1
            is_last = self._done[path] >= self._num_loggers
            if is_last:
                del self._done[path]
        if is_last:
            path.unlink(missing_ok=True)


class StepMedia:
    """The images and histograms of the steps that are not logged yet, for one logger.

    Args:
        run_dir: The run folder.
        files: The files of the images.
    """

    def __init__(self, run_dir: Path, files: MediaFiles) -> None:
        self.num_absent = 0
        """Images of committed steps whose file is not here: the worker was on another node."""
        self.num_dropped = 0
        """Images and histograms that were given up because too many were waiting."""
        self._folder, self._files = media_dir(run_dir), files
        self._waiting: dict[int, dict[str, MediaRecord]] = {}
        self._num_waiting = 0

    def add(self, record: MediaRecord) -> None:
        """Take a record; a later one of the same name and step replaces it. If too many wait, drop those of the oldest step."""
        of_step = self._waiting.setdefault(record.step, {})
        if (before := of_step.get(record.name)) is not None:
            self._drop([before])
        of_step[record.name] = record
        self._num_waiting += 1
        while self._num_waiting > MOST_WAITING and len(self._waiting) > 1:
            oldest = self._waiting.pop(min(self._waiting))
            self.num_dropped += len(oldest)
            self._drop(oldest.values())

    def attach(self, step: LoggedStep) -> LoggedStep:
        """Return a committed step with its images and histograms; drop those of earlier steps, which were logged."""
        media = self._waiting.pop(step.step, {})
        self._num_waiting -= len(media)
        if any(not image.path.is_file() for image in step.images.values()):  # read from a record before it was dropped
            there = {name: image for name, image in step.images.items() if image.path.is_file()}
            self.num_absent += len(step.images) - len(there)
            step = replace(step, images=there)
        for number in [number for number in self._waiting if number < step.step]:
            self._drop(self._waiting.pop(number).values())
        complete = with_media(step, media.values(), self._folder)
        self.num_absent += len(media) - len(complete.images) - len(complete.histograms)
        return complete

    def done(self, step: LoggedStep) -> None:
        """A step was logged."""
        for image in step.images.values():
            self._files.release(image.path)

    def _drop(self, records: Iterable[MediaRecord]) -> None:
        for record in records:
            self._num_waiting -= 1
            if isinstance(record, ImageLogged) and record.file:
                self._files.release(self._folder / record.file)


def with_media(step: LoggedStep, records: Iterable[MediaRecord], folder: Path) -> LoggedStep:
    """Return a step with its images, as far as their files are there, and its histograms."""
    images, histograms = {}, {}
    for record in records:
        if isinstance(record, HistogramLogged):
            histograms[record.name] = record
        elif record.file and (path := folder / Path(record.file).name).is_file():
            images[record.name] = LoggedImage(
                path=path, width=record.width, height=record.height, channels=record.channels
            )
    return replace(step, images=images, histograms=histograms) if images or histograms else step
