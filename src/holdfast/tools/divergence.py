"""The divergence of two runs: the first step that differs, and in which respect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import CheckpointError, ConfigError
from holdfast.records.types import CheckpointSaved, RunStarted
from holdfast.recovery.registry import strategy_class
from holdfast.tools.certificate import CertifiedSteps, differing

if TYPE_CHECKING:
    from holdfast.tools.checkpoints.compare import ValueDifference

_MODEL = "replica/"
"""Prefix of the paths of model and optimizer in a checkpoint."""
_DECIDE = ("seed", "slices", "order", "split", "batch", "rescale", "parameters")
"""Settings of a run that decide its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step in which two runs differ.

    Args:
        step: The step; one past the last if only the final states differ.
        what: Of ``samples``, ``state`` (before the step), ``metrics``; empty for the final state.
        where: The part of the state that differs, "" if none does.
        same_until: The last step before which that part of the state was hashed and equal; -1 if there is none.
        tensors: Differing tensors, if both runs hashed all tensors before that step, or before a later one.
        tensors_step: The step of these hashes, -1 if there is none.
        workers: In a split model, workers of the first run with values that no worker of the other had at that step.
        metrics: Metrics that differ, with both values.
    """

    step: int
    what: tuple[str, ...]
    where: str = ""
    same_until: int = -1
    tensors: tuple[str, ...] = ()
    tensors_step: int = -1
    workers: tuple[int, ...] = ()
    metrics: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The range over which two runs were compared, and the result.

    Args:
        first: The first step that both have.
        last: The last step that both have.
        divergence: Their divergence, None if they are equal.
    """

    first: int
    last: int
    divergence: Divergence | None


def compare_runs(one: CertifiedSteps, other: CertifiedSteps, *, until: int | None = None) -> RunComparison | None:
    """Compare two runs step by step; None if they have no step in common.

    Steps are compared by their content, not by their links, so the chains may begin at different steps.

    Args:
        one: The first run.
        other: The second run.
        until: Steps after this one are ignored.
    """
    last = min(one.last, other.last) if until is None else min(one.last, other.last, until)
    common = [step for step in one.steps if step in other.steps and step <= last]
    if not common:
        return None
    for step in common:
        if what := differing(one.steps[step], other.steps[step]):
            divergence = _describe(one, other, step, tuple(what))
            return RunComparison(first=common[0], last=common[-1], divergence=divergence)
    return RunComparison(first=common[0], last=common[-1], divergence=_at_the_end(one, other, common[-1]))


def _describe(one: CertifiedSteps, other: CertifiedSteps, step: int, what: tuple[str, ...]) -> Divergence:
    a, b = one.steps[step], other.steps[step]
    names = [*a.metrics, *(name for name in b.metrics if name not in a.metrics)]
    values = {name: (a.metrics.get(name), b.metrics.get(name)) for name in names}
    where = (a.where or b.where or _part(one, step)) if "state" in what else ""
    tensors_step, tensors = _tensors(one, other, step)
    return Divergence(
        step=step,
        what=what,
        where=where,
        same_until=max(_same_before(one, other, step, where), default=-1) if where else -1,
        tensors=tensors,
        tensors_step=tensors_step,
        workers=_workers(one, other, tensors_step),
        metrics={name: pair for name, pair in values.items() if pair[0] != pair[1]} if "metrics" in what else {},
    )


def _part(run: CertifiedSteps, step: int) -> str:
    """Return the part of a split model that a step hashes a window of; records of a lead without it lack this."""
    return f"part {step % run.parts}" if run.parts else ""


def _same_before(one: CertifiedSteps, other: CertifiedSteps, step: int, where: str) -> Iterator[int]:
    """Yield the steps before ``step`` in which the part of the state that now differs was hashed."""
    for number, line in one.steps.items():
        both = number < step and number in other.steps
        if both and (line.whole or (line.where or other.steps[number].where) == where):
            yield number


def _tensors(one: CertifiedSteps, other: CertifiedSteps, step: int) -> tuple[int, tuple[str, ...]]:
    """Return the first step from ``step`` on before which both hashed all tensors and some differ, and those."""
    for at in sorted(number for number in one.wholes if number in other.wholes and number >= step):
        a, b = one.digests(at), other.digests(at)
        paths = [*a, *(path for path in b if path not in a)]
        if odd := tuple(path for path in paths if a.get(path) != b.get(path)):
            return at, odd
    return -1, ()


def _workers(one: CertifiedSteps, other: CertifiedSteps, step: int) -> tuple[int, ...]:
    """Return the holders of parts in the first run that had values before a step that no worker had in the second."""
    digests = other.digests(step)
    odd = {
        r.rank
        for r in one.holders(step)
        if any(digest not in digests.get(path, ()) for path, digest in r.tensors.items())
    }
    return tuple(sorted(odd))


def _at_the_end(one: CertifiedSteps, other: CertifiedSteps, last: int) -> Divergence | None:
    """Return the divergence of the final states, if both runs end after the same step and the states differ."""
    ends = [run.finished[0] for run in (one, other) if run.finished]
    if len(ends) < 2 or any(end.step != last + 1 for end in ends):
        return None
    if (ends[0].sha256, ends[0].state_sha256) == (ends[1].sha256, ends[1].state_sha256):
        return None
    step, tensors = _tensors(one, other, last + 1)
    return Divergence(
        step=last + 1, what=(), tensors=tensors, tensors_step=step, workers=_workers(one, other, step), metrics={}
    )


def different_settings(
    runs: Sequence[CertifiedSteps], reports: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that decide bits and differ between two runs, if both record them: by name, both values.

    Args:
        runs: The two runs.
        reports: The report of each.
    """
    a, b = (_deciding_settings(run.started, report.get("job") or {}) for run, report in zip(runs, reports, strict=True))
    return {name: (a[name], b[name]) for name in a if name in b and a[name] != b[name]}


def _deciding_settings(started: RunStarted, job: Mapping[str, Any]) -> dict[str, Any]:
    strategy = "without loss" if strategy_class(started.strategy).exact else started.strategy
    settings = {name: getattr(started, name) for name in _DECIDE} | {"strategy": strategy} | dict(started.platform)
    program = {"script": job["sha256"], "arguments": job["args"], **job["versions"]} if job else {}
    return settings | program


def first_saved_difference(
    runs: Sequence[CertifiedSteps], divergence: Divergence, progress: Callable[[str], AbstractContextManager[object]]
) -> tuple[int, ValueDifference] | None:
    """Return the first different value in the first common checkpoints after the divergence, and their step.

    Args:
        runs: The two runs.
        divergence: Their divergence.
        progress: Shows a text while two checkpoints are compared.
    """
    from holdfast.tools.checkpoints.compare import first_difference
    from holdfast.tools.checkpoints.paths import opened

    places = [_checkpoints(run) for run in runs]
    for step in sorted(step for step in places[0] if step in places[1] and step >= divergence.step):
        try:
            with progress(f"comparing step {step}"), opened(places[0][step]) as a, opened(places[1][step]) as b:
                spot = first_difference(a, b, _MODEL)
        except (CheckpointError, ConfigError):  # removed since, or damaged: try the next one
            continue
        if spot is not None:
            return step, spot
    return None


def _checkpoints(run: CertifiedSteps) -> dict[int, str]:
    return {record.step: record.path for record in run.records if isinstance(record, CheckpointSaved)}
