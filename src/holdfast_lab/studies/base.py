"""What a study is, and carrying one out: task by task, so that an interrupted one goes on where it was.

``DIR/rows.jsonl`` has a first line that says what was asked, and one line a finished task. A task that was
not finished is done again as a whole; nothing that was measured is measured twice.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import ConfigError
from holdfast_lab.studies.stats import wilson

Row = dict[str, Any]

JOURNAL = "rows.jsonl"
_NAMED = 12
"""So many tasks that are missing are named one by one."""
_WIDE = 1.5
"""Bounds of what is left are told where they are further apart than this."""

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"
NOT_RUN = "not run"

SHARE = "share"
"""The unit of a number from 0 to 1 that is a part of a whole."""

NOT_CHECKED = "not checked: nothing was run that tells"

_TELLING = 0.5
"""A claim holds by a share of runs only if its interval is narrower than this: an interval that reaches below a half does not
exclude chance. With the exact interval it takes six runs of six."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asked for.

    Args:
        out: Where results go.
        data: Where datasets are that are read from files; None if nothing was said.
        quick: Measure as much as fits into a minute.
        seed: Of everything that is drawn.
        only: Frameworks, or kinds of parallelism; empty: all.
        repetitions: Of each measurement, ``>= 1``; None: as many as the study finds right.
        model: The only network to measure; "" leaves the choice to the study.
    """

    out: Path
    data: Path | None = None
    quick: bool = False
    seed: int = 0
    only: tuple[str, ...] = ()
    repetitions: int | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a study that is done as a whole.

    Args:
        key: Its name, unique in the study.
        run: Does it; gets the rows of the tasks before it.
    """

    key: str
    run: Callable[[Sequence[Row]], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of a paper, and what we found.

    Args:
        claim: In one sentence.
        source: Where it comes from.
        paper: The number it gives, None if it gives none.
        ours: The number that we found, None if it was not measured.
        unit: Of all numbers of the claim, as it stands behind them: ``%``, ``points``; :data:`SHARE` is shown in percent;
            "" for a number that has none.
        ci: Its 95 % confidence interval, an end of it infinite where the data set none; None if there is no interval.
        holds: Whether it does; None if it was not checked. A claim with too little evidence is undecided, which is None, too: one
            on a single run, and one that would hold by a share of runs with an interval wider than a half. A single run in which
            it is not so refutes a claim about all runs.
        found: In words.
        runs: Number of runs, or pairs of runs, behind an interval that is not of a share.
    """

    claim: str
    source: str
    paper: float | None = None
    ours: float | None = None
    ci: tuple[float, float] | None = None
    holds: bool | None = None
    found: str = ""
    unit: str = ""
    runs: int | None = None

    def __post_init__(self) -> None:
        if (self.runs is not None and self.runs < 2) or (self.holds and self._share_width() > _TELLING):
            object.__setattr__(self, "holds", None)

    def _share_width(self) -> float:
        """Return the width of the interval of a share of runs that is all or none of them; 0 for any other interval."""
        whole = {SHARE: 1.0, "%": 100.0}.get(self.unit)
        if whole is None or self.ci is None:
            return 0.0
        low, high = (end / whole for end in self.ci)
        return high - low if (low == 0 and high <= 1) or (high == 1 and low >= 0) else 0.0

    def judged(
        self,
        ours: float,
        holds: bool | None,
        found: str,
        *,
        ci: tuple[float, float] | None = None,
        unit: str | None = None,
        runs: int | None = None,
    ) -> Claim:
        """Return the same statement with what was found; ``unit`` is what it was, unless given."""
        unit = self.unit if unit is None else unit
        return replace(self, ours=ours, holds=holds, found=found, ci=ci, unit=unit, runs=runs)

    def judged_by_count(self, good: int, tries: int, found: str, holds: bool | None = None) -> Claim:
        """Return the same statement with a share in percent and Wilson's interval; it holds if all are good, unless given."""
        ours, ci = in_percent(good, tries)
        return self.judged(ours, good == tries if holds is None else holds, found, ci=ci, unit="%")

    def to_dict(self) -> dict[str, Any]:
        """Return it as it stands in ``results.json``."""
        # JSON has no infinity: an end that there is not is null.
        ci = None if self.ci is None else [end if math.isfinite(end) else None for end in self.ci]
        names = ("claim", "source", "paper", "ours", "unit")
        return {name: getattr(self, name) for name in names} | {"ci": ci, "holds": self.holds, "found": self.found}


def statement(claim: str, source: str, paper: float | None = None, unit: str = "", found: str = NOT_CHECKED) -> Claim:
    """Return a claim that nothing was run for yet; :meth:`Claim.judged` says what was found."""
    return Claim(claim=claim, source=source, paper=paper, unit=unit, found=found)


def in_percent(good: int, tries: int) -> tuple[float, tuple[float, float]]:
    """Return a share of tries, and Wilson's 95 % interval of it, both in percent."""
    low, high = wilson(good, tries)
    return 100 * good / tries, (100 * low, 100 * high)


class Study(Protocol):
    """An experiment that can be repeated."""

    name: str
    """On the command line."""
    title: str
    paper: str
    """Authors, title, year, number."""
    intervals: str
    """Where its 95 % intervals come from, in a sentence for the page."""
    task_s: float
    """What a task of the whole study takes on the average, seconds: as it was on two cores."""
    quick_task_s: float
    """The same with ``--quick``."""

    def settings(self, options: Options) -> dict[str, Any]:
        """Return what decides about the numbers: another value makes it another study."""
        ...

    def tasks(self, options: Options) -> list[Task]:
        """Return what is to be done, in order."""
        ...

    def left_out(self, options: Options) -> list[str]:
        """Return what is not done, in sentences."""
        ...

    def claims(self, rows: Sequence[Row], seed: int) -> list[Claim]:
        """Hold the claims against the rows."""
        ...

    def page(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the sections of the page; :func:`holdfast_lab.pages.study.render_study` says what a section may be."""
        ...


def check_parts(only: Sequence[str], known: Collection[str]) -> None:
    """Make sure that all parts of a study that are asked for are there.

    Args:
        only: What was given with ``--only``.
        known: What there is.

    Raises:
        ConfigError: if one is not.
    """
    for name in only:
        if name not in known:
            raise ConfigError(f"--only must be one of {', '.join(known)}, got {name!r}")


def parts_left_out(only: Sequence[str], known: Collection[str]) -> list[str]:
    """Return in a sentence which parts of a study are not done because others were asked for; none if all are done."""
    missing = [name for name in known if only and name not in only]
    return [f"Parts: {', '.join(missing)}."] if missing else []


def carry_out(study: Study, options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Do what is not done yet, and return what ``results.json`` holds; writes it, too.

    Args:
        study: Which.
        options: How.
        say: Is told what happens, a line at a time.

    Raises:
        ConfigError: if the directory holds another study, or the same with other settings.
    """
    settings = study.settings(options)
    journal = Journal(options.out, study.name, settings)
    tasks = study.tasks(options)
    known = journal.read()
    pace = Pace(study.quick_task_s if options.quick else study.task_s, journal.took_s)
    if missing := [task.key for task in tasks if task.key not in known]:
        say(f"{len(tasks)} tasks, {len(missing)} of them to do, {pace.left(missing)}")
    if done := len(tasks) - len(missing):
        say(f"{done} of {len(tasks)} tasks were done before; remove {options.out} to measure them again")
    rows: list[Row] = []
    try:
        for number, task in enumerate(tasks, start=1):
            if task.key not in known:
                rest = [other.key for other in tasks[number - 1 :] if other.key not in known]
                say(f"[{number}/{len(tasks)}] {task.key}" + (f"; {pace.left(rest)}" if journal.took_s else ""))
                begun_s = time.monotonic()
                known[task.key] = task.run(rows)
                journal.add(task.key, known[task.key], time.monotonic() - begun_s)
            rows += known[task.key]
    finally:  # an interrupted study shows what it has
        missing = [task.key for task in tasks if task.key not in known]
        results = _results(study, options, settings, rows, missing)
        journal.finish(results)
    return results


class Pace:
    """How long what is left of a study will take.

    Args:
        task_s: What a task took on the average where it was measured once, on two cores.
        took_s: What tasks took here, by their names.
    """

    def __init__(self, task_s: float, took_s: Mapping[str, float]) -> None:
        self._task_s, self._took_s = task_s, took_s

    def left(self, keys: Sequence[str]) -> str:
        """Return in words how long the tasks of these names will take, between what bounds, and where that is known from."""
        if not self._took_s:
            return f"about {_in_words(self._task_s * len(keys))}, as it was once on two cores"
        kinds: dict[str, list[float]] = {}
        for key, taken_s in self._took_s.items():
            kinds.setdefault(_kind(key), []).append(taken_s)
        every = [self._task_s, *self._took_s.values()]
        about_s, low_s, high_s = 0.0, 0.0, 0.0
        for kind, number in Counter(map(_kind, keys)).items():
            known = kinds.get(kind)
            mean_s = statistics.fmean(known or every)
            about_s += number * mean_s
            if known is None:  # of which none is done yet: it may be like any other
                low_s, high_s = low_s + number * min(every), high_s + number * max(every)
            else:
                off_s = _off_s(known, number)
                low_s += max(number * mean_s - off_s, number * min(known))
                high_s += min(number * mean_s + off_s, number * max(known))
        bounds = f" ({_in_words(low_s)} to {_in_words(high_s)})" if high_s > _WIDE * low_s else ""
        return f"about {_in_words(about_s)}{bounds}, by what {len(self._took_s)} took here"


def _off_s(known: Sequence[float], number: int) -> float:
    """Return how far the sum of ``number`` more may be from what these say: two standard errors of the difference."""
    if len(known) < 2:
        return 0.0
    return 2 * statistics.stdev(known) * math.sqrt(number + number**2 / len(known))


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5 * 3600 else f"{seconds / 3600:.0f} h"


def _kind(key: str) -> str:
    """Return what tasks that are alike have in common in their names."""
    return key.split(":")[0]


def _results(
    study: Study, options: Options, settings: Mapping[str, Any], rows: list[Row], missing: Sequence[str]
) -> dict[str, Any]:
    loads = [round(load, 2) for load in os.getloadavg()]
    interrupted = [f"Not measured yet, because the study was interrupted: {_grouped(missing)}."] if missing else []
    return {
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "intervals": study.intervals,
        "settings": {**settings, "machine": machine(), "load average at the end": loads},
        "left_out": [*study.left_out(options), *interrupted],
        "rows": rows,
        "claims": [claim.to_dict() for claim in study.claims(rows, options.seed)],
        "page": study.page(rows),
    }


def _grouped(keys: Sequence[str]) -> str:
    """Return names of tasks, in one word where many begin alike."""
    if len(keys) <= _NAMED:
        return ", ".join(keys)
    kinds = Counter(map(_kind, keys))
    return f"{len(keys)} tasks, " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items())


class Journal:
    """The rows of finished tasks, on disk.

    Args:
        out: The study's directory; made by the first write.
        name: Of the study.
        settings: That the rows belong to.
    """

    def __init__(self, out: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._out = out
        self._head: Row = {"study": name, "settings": json.loads(json.dumps(settings))}
        self.took_s: dict[str, float] = {}
        """What tasks took that have been read or added, by their names; older files do not say it."""

    def read(self) -> dict[str, list[Row]]:
        """Return the rows of each finished task.

        Raises:
            ConfigError: if they belong to something else.
        """
        path = self._out / JOURNAL
        if not path.is_file():
            return {}
        entries = list(_whole_lines(path))
        if not entries:
            return {}
        if entries[0] != self._head:
            raise ConfigError(
                f"{path} belongs to {_difference(entries[0], self._head)}; give another --out, or remove {self._out}"
            )
        self.took_s |= {entry["task"]: entry["took_s"] for entry in entries[1:] if "took_s" in entry}
        return {entry["task"]: entry["rows"] for entry in entries[1:]}

    def add(self, key: str, rows: Sequence[Row], took_s: float) -> None:
        """Write down that a task is done, and in how many seconds."""
        path = self._out / JOURNAL
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            entries = list(_whole_lines(path)) if path.is_file() else []
            if not entries:
                path.write_text(json.dumps(self._head) + "\n")
            elif not path.read_bytes().endswith(b"\n"):  # a line that was cut off by a death
                path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
            with path.open("a") as file:
                file.write(json.dumps({"task": key, "rows": list(rows), "took_s": round(took_s, 3)}) + "\n")
            self.took_s[key] = took_s
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; give a directory that can be written with --out"
            ) from error

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write ``results.json``."""
        from holdfast.report import write_results

        write_results(results, self._out)


def _whole_lines(path: Path) -> list[Row]:
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break  # a death in the middle of a line: its task is done again
    return entries


def _difference(theirs: Row, ours: Row) -> str:
    if theirs.get("study") != ours["study"]:
        return f"the study {theirs.get('study')!r}"
    return differing(theirs.get("settings", {}), ours["settings"])


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return in words which settings differ, "" if none does."""
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return "; ".join(f"{name} = {old.get(name)!r}, asked was {new.get(name)!r}" for name in names)


def machine() -> str:
    """Return on what this runs, in words."""
    model = "an unnamed processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].strip() if lines else model
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory_bytes / 2**30:.0f} GiB"
