"""The interface of a study, and the runner that executes its tasks one by one and can resume after an interruption.

The first line of ``DIR/rows.jsonl`` holds the study's settings, and each further line a task that ended. An unfinished
task and a failed one are repeated as a whole; a finished one is never measured again.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import ConfigError
from holdfast_lab.studies.pace import Pace, kind_of
from holdfast_lab.studies.stats import wilson

Row = dict[str, Any]

JOURNAL = "rows.jsonl"
_NAMED = 12
"""Up to this many missing tasks are listed by name."""

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"
NOT_RUN = "not run"
"""Status of a row that this machine or this setting cannot give; ``why`` says what is missing. The task is finished."""
FAILED = "failed"
"""Status of a row whose measurement broke; ``why`` gives the reason. The next run measures its task again."""

SHARE = "share"
"""Unit of a fraction from 0 to 1 of a whole."""

NOT_CHECKED = "not checked: no run of this study measures it"

_TELLING = 0.5
"""A claim about a share of runs holds only if its interval is narrower than this: an interval that reaches below a half
does not exclude chance. With the exact interval this takes six runs of six."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of ``holdfast study``.

    Args:
        out: Directory for the results.
        data: Directory of datasets that are read from files; None if not given.
        quick: Measure only as much as takes about a minute.
        seed: Seed of all random draws.
        only: Frameworks, or kinds of parallelism; empty: all.
        repetitions: Repetitions of each measurement, ``>= 1``; None: the study's own number.
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
    """A part of a study that is executed and saved as a whole.

    Args:
        key: Its name, unique in the study.
        run: Executes it, given the rows of all earlier tasks, and returns its rows.
        derived: It measures nothing, it computes from what earlier tasks measured: it is done again by the next run if
            one of them failed.
    """

    key: str
    run: Callable[[Sequence[Row]], list[Row]]
    derived: bool = False


class EarlierPartFailed(Exception):
    """A task cannot be executed because an earlier one failed; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that failed, in whole or in part.

    Args:
        task: Its key.
        why: The reasons, in one line.
        parts: Kinds of measurements that are missing: the kind of the task, and the ``part`` of each failed row.
    """

    task: str
    why: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper, and our result.

    Args:
        claim: The claim in one sentence.
        source: Its source.
        paper: The paper's number, None if it gives none.
        ours: Our number, None if it was not measured.
        unit: Unit of all numbers of the claim, as displayed after them: ``%``, ``points``; :data:`SHARE` is displayed
            in percent; "" for a number without unit.
        ci: 95 % confidence interval of our number, an end infinite where the data do not bound it; None without
            interval.
        holds: Whether the claim holds; None if it was not checked, or if there is too little evidence: from a single
            run, or a share of runs whose interval is wider than a half. One counterexample refutes a claim about all
            runs.
        found: The result in words.
        runs: Number of runs, or of pairs of runs, behind an interval that is not that of a share.
        parts: Kinds of tasks, or parts of rows, that decide it: if one failed, it is not merely unchecked.
        failed: Whether it was not checked because such a part failed; ``found`` then begins with "failed: ".
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
    parts: tuple[str, ...] = ()
    failed: bool = False

    def __post_init__(self) -> None:
        if (self.runs is not None and self.runs < 2) or (self.holds and self._share_width() > _TELLING):
            object.__setattr__(self, "holds", None)

    def _share_width(self) -> float:
        """Return the width of the interval of a share of runs that is 0 or 1; 0 for any other interval."""
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
        """Return this claim with a result; the unit is kept unless ``unit`` is given."""
        unit = self.unit if unit is None else unit
        return replace(self, ours=ours, holds=holds, found=found, ci=ci, unit=unit, runs=runs)

    def judged_by_count(self, good: int, tries: int, found: str, holds: bool | None = None) -> Claim:
        """Return this claim with a share in percent and Wilson's interval; by default it holds if all are good."""
        ours, ci = in_percent(good, tries)
        return self.judged(ours, good == tries if holds is None else holds, found, ci=ci, unit="%")

    def to_dict(self) -> dict[str, Any]:
        """Return the claim as ``results.json`` stores it."""
        # JSON has no infinity: an unbounded end is null.
        ci = None if self.ci is None else [end if math.isfinite(end) else None for end in self.ci]
        names = ("claim", "source", "paper", "ours", "unit")
        judged = {"ci": ci, "holds": self.holds, "found": self.found, "failed": self.failed}
        return {name: getattr(self, name) for name in names} | judged

    def unless_failed(self, failures: Sequence[TaskFailure]) -> Claim:
        """Return this claim; if it has no number because of a failure, with that as its result."""
        mine = [failure for failure in failures if set(failure.parts) & set(self.parts)]
        if self.ours is not None or not mine:
            return self
        return replace(self, failed=True, found="failed: " + "; ".join(f"{one.task}: {one.why}" for one in mine))


def statement(claim: str, source: str, paper: float | None = None, unit: str = "", found: str = NOT_CHECKED) -> Claim:
    """Return a claim without a result; :meth:`Claim.judged` adds one."""
    return Claim(claim=claim, source=source, paper=paper, unit=unit, found=found)


def decided_by(parts: Sequence[str], claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims, noting the kinds of tasks or parts of rows that decide them."""
    return [replace(claim, parts=tuple(parts)) for claim in claims]


def in_percent(good: int, tries: int) -> tuple[float, tuple[float, float]]:
    """Return the share of good tries and its Wilson 95 % interval, both in percent."""
    low, high = wilson(good, tries)
    return 100 * good / tries, (100 * low, 100 * high)


class Plan(Protocol):
    """What a run of a study does; made from its options, which it checks."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the results, besides ``--quick`` and the seed: others, another study."""
        ...

    def tasks(self) -> list[Task]:
        """Return all tasks, in order of execution."""
        ...

    def left_out(self) -> list[str]:
        """Return what the study leaves out, in sentences."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A repeatable experiment."""

    name: str
    """The name on the command line."""
    title: str
    paper: str
    """Authors, title, year, number."""
    intervals: str
    """How its 95 % intervals are computed, in a sentence for the page."""
    task_s: float
    """Average seconds per task of the whole study, measured on two cores."""
    quick_task_s: float
    """Average seconds per task with ``--quick``."""
    plan: Callable[[Options], Plan]
    """Makes a plan; raises ConfigError if an option has an invalid value."""
    claims: Callable[[Sequence[Row], int], list[Claim]]
    """Returns every claim with its result from the rows; the number is the seed."""
    page: Callable[[Sequence[Row]], list[dict[str, Any]]]
    """Returns the sections of the page; :mod:`holdfast_lab.pages.study` documents them."""


def check_parts(names: Sequence[str], known: Collection[str], option: str = "--only") -> None:
    """Check that all values of an option are known.

    Raises:
        ConfigError: if one is not.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} must be one of {', '.join(known)}, got {name!r}")


def check_data(data: Path | None) -> None:
    """Check that the directory of ``--data`` exists, if it was given.

    Raises:
        ConfigError: if it does not.
    """
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data must be an existing directory, got {str(data)!r}")


def parts_left_out(only: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a sentence that lists the parts excluded by ``--only``; an empty list if none is excluded."""
    missing = [name for name in known if only and name not in only]
    return [f"Parts: {', '.join(missing)}."] if missing else []


def carry_out(
    study: Study,
    options: Options,
    say: Callable[[str], None] = lambda _: None,
    tell: Callable[[str, float, float], None] = lambda text, share, left_s: None,
) -> dict[str, Any]:
    """Execute the unfinished tasks, write ``results.json``, and return its contents.

    A task that raises, or that returns a row whose status is :data:`FAILED`, has failed. It is noted with its reason in
    the journal and under ``failed`` in the results, the others are executed, and the next call measures it again.

    Args:
        study: The study.
        options: Its options.
        say: Called with each progress line.
        tell: Called before each task with its name, the share of the time that has passed, and the seconds that are
            left, both estimated.

    Raises:
        ConfigError: if the directory holds another study, or the same study with other settings.
    """
    plan = study.plan(options)
    settings = {"quick": options.quick, "seed": options.seed, **plan.settings()}
    journal = Journal(options.out, study.name, settings)
    tasks = plan.tasks()
    known = journal.read()
    pace = Pace(study.quick_task_s if options.quick else study.task_s, journal.took_s)
    if missing := [task.key for task in tasks if task.key not in known]:
        say(f"{len(tasks)} tasks, {len(missing)} left, {pace.left(missing)}")
    if done := len(tasks) - len(missing):
        say(f"{done} of {len(tasks)} tasks are already finished; remove {options.out} to measure them again")
    if again := [task.key for task in tasks if task.key in journal.failed]:
        say(f"measured again, because it failed: {_grouped(again)}")
    rows: list[Row] = []
    failures: list[TaskFailure] = []
    try:
        for number, task in enumerate(tasks, start=1):
            if task.key not in known:
                rest = [other.key for other in tasks[number - 1 :] if other.key not in known]
                say(f"[{number}/{len(tasks)}] {task.key}" + (f"; {pace.left(rest)}" if journal.took_s else ""))
                tell(f"[{number}/{len(tasks)}] {task.key}", *pace.share_and_left_s(rest))
                begun_s = time.monotonic()
                known[task.key], failure, trace = _executed(task, rows)
                if failure is not None:
                    say(f"{task.key}: failed: {failure.why}")
                    failures.append(failure)
                if failure is not None or not (task.derived and failures):
                    journal.add(task.key, known[task.key], time.monotonic() - begun_s, failure, trace)
            rows += known[task.key]
    finally:  # an interrupted study still writes its partial results
        missing = [task.key for task in tasks if task.key not in known]
        results = _results(study, plan, settings, rows, missing, failures)
        journal.finish(results)
    return results


def _executed(task: Task, rows: Sequence[Row]) -> tuple[list[Row], TaskFailure | None, str]:
    """Execute a task; return its rows, how it failed (None if it did not), and the traceback of what it raised."""
    try:
        found = task.run(rows)
    except EarlierPartFailed as error:
        return [], TaskFailure(task.key, str(error), (kind_of(task.key),)), ""
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return [], TaskFailure(task.key, why, (kind_of(task.key),)), traceback.format_exc()
    broken = [row for row in found if row.get("status") == FAILED]
    if not broken:
        return found, None, ""
    why = "; ".join(dict.fromkeys(str(row["why"]) for row in broken))
    return found, TaskFailure(task.key, why, tuple({kind_of(task.key): 0} | {row["part"]: 0 for row in broken})), ""


def _results(
    study: Study, plan: Plan, settings: Row, rows: list[Row], missing: Sequence[str], failures: Sequence[TaskFailure]
) -> dict[str, Any]:
    loads = [round(load, 2) for load in os.getloadavg()]
    interrupted = [f"Not measured yet, because the study was interrupted: {_grouped(missing)}."] if missing else []
    return {
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "intervals": study.intervals,
        "settings": {**settings, "machine": machine(), "load average at the end": loads},
        "left_out": [*plan.left_out(), *interrupted],
        "rows": rows,
        "failed": [{"task": failure.task, "why": failure.why} for failure in failures],
        "claims": [claim.unless_failed(failures).to_dict() for claim in study.claims(rows, settings["seed"])],
        "page": study.page(rows),
    }


def _grouped(keys: Sequence[str]) -> str:
    """Return task names as text; many are counted by kind."""
    if len(keys) <= _NAMED:
        return ", ".join(keys)
    kinds = Counter(map(kind_of, keys))
    return f"{len(keys)} tasks, " + ", ".join(f"{kind} ({count})" for kind, count in kinds.items())


class Journal:
    """The rows of finished tasks, on disk.

    Args:
        out: The study's directory; created by the first write.
        name: Name of the study.
        settings: The settings that the rows belong to.
    """

    def __init__(self, out: Path, name: str, settings: Mapping[str, Any]) -> None:
        self._out = out
        self._head: Row = {"study": name, "settings": json.loads(json.dumps(settings))}
        self.took_s: dict[str, float] = {}
        """Seconds of each finished task that was read or added, by name; older files lack them."""
        self.failed: dict[str, str] = {}
        """The reason of each task that was read, has failed, and was not measured since."""

    def read(self) -> dict[str, list[Row]]:
        """Return the rows of each finished task.

        Raises:
            ConfigError: if the rows belong to another study or to other settings.
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
        known: dict[str, list[Row]] = {}
        for entry in entries[1:]:
            key = entry["task"]
            if why := _failed(entry):
                self.failed[key] = why
                continue
            self.failed.pop(key, None)
            known[key] = entry["rows"]
            self.took_s |= {key: entry["took_s"]} if "took_s" in entry else {}
        return known

    def add(
        self, key: str, rows: Sequence[Row], took_s: float, failure: TaskFailure | None = None, trace: str = ""
    ) -> None:
        """Save a task that ended: its rows, its duration in seconds, and how it failed, if it did."""
        entry = {"task": key, "rows": list(rows), "took_s": round(took_s, 3), "failed": failure.why if failure else ""}
        entry |= {"traceback": trace} if trace else {}
        path = self._out / JOURNAL
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            entries = list(_whole_lines(path)) if path.is_file() else []
            if not entries:
                path.write_text(json.dumps(self._head) + "\n")
            elif not path.read_bytes().endswith(b"\n"):  # the process was killed while it wrote the last line
                path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
            with path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if failure is None:
                self.took_s[key] = took_s
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; give a directory that can be written with --out"
            ) from error

    def finish(self, results: Mapping[str, Any]) -> None:
        """Write ``results.json``."""
        from holdfast.summary.files import write_results

        write_results(results, self._out)


def _failed(entry: Row) -> str:
    """Return why a task failed, "" if it did not; one that does not say so counts as failed."""
    return str(entry.get("failed", "its line in the journal does not say whether it failed"))


def _whole_lines(path: Path) -> list[Row]:
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break  # the process was killed while it wrote this line: its task is repeated
    return entries


def _difference(theirs: Row, ours: Row) -> str:
    if theirs.get("study") != ours["study"]:
        return f"the study {theirs.get('study')!r}"
    return differing(theirs.get("settings", {}), ours["settings"])


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the differing settings in words, "" if none differs."""
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return "; ".join(f"{name} = {old.get(name)!r}, requested {new.get(name)!r}" for name in names)


def machine() -> str:
    """Return a description of this machine: cores, processor, memory."""
    model = "an unnamed processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].strip() if lines else model
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory_bytes / 2**30:.0f} GiB"
