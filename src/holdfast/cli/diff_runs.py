"""``holdfast diff-runs``: up to which step two runs are identical, and what differs then."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from holdfast.cli.progress import progress
from holdfast.cli.tables import count, print_json, say

if TYPE_CHECKING:
    from holdfast.tools.certificate import CertificateFinding, CertifiedSteps
    from holdfast.tools.checkpoints.compare import ValueDifference
    from holdfast.tools.divergence import Divergence, RunComparison

_MOST_TENSORS = 5
_WRONG = 3


def diff_runs(
    first: Annotated[Path, Argument(metavar="A", help="The report directory of a run.", show_default=False)],
    second: Annotated[Path, Argument(metavar="B", help="The report directory of another run.", show_default=False)],
    *,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> int:
    """Find the step at which two runs diverge, and what differs there.

    Compares the certified steps in events.jsonl: samples, metrics and digests of the state, but not failures. If both
    runs saved the state after the step at which they diverge, also prints the first value that differs. Exits with 0 if
    the runs are identical as far as both go, with 1 if they diverge, with 3 if they do not but the records of one are
    inconsistent, or the replicas of one differed.

    Example: holdfast diff-runs undisturbed eleven-faults
    """
    from holdfast.errors import ConfigError
    from holdfast.records.files import load_events
    from holdfast.summary.files import load_report
    from holdfast.tools.certificate import CertifiedSteps
    from holdfast.tools.divergence import compare_runs, different_settings, first_saved_difference

    reports = [load_report(folder) for folder in (first, second)]
    runs = [CertifiedSteps(load_events(folder), str(folder)) for folder in (first, second)]
    settings = different_settings(runs, reports)
    compared = compare_runs(*runs)
    if compared is None:
        a, b = (f"steps {run.first} to {run.last}" for run in runs)
        raise ConfigError(f"the runs have no step in common: {first} has {a}, {second} {b}")
    spot = None if compared.divergence is None else first_saved_difference(runs, compared.divergence, progress)
    findings = [run.check() or run.check_workers() for run in runs]
    if as_json:
        print_json(_as_dict(compared, settings, spot, findings))
    else:
        _show(compared, runs, settings, spot, findings)
    if compared.divergence is not None:
        return 1
    return _WRONG if any(findings) else 0


# -- output


def _show(
    compared: RunComparison,
    runs: list[CertifiedSteps],
    settings: Mapping[str, tuple[Any, Any]],
    spot: tuple[int, ValueDifference] | None,
    findings: Sequence[Sequence[CertificateFinding]],
) -> None:
    for letter, run in zip("AB", runs, strict=True):
        title = f"{letter}  {run.name}: steps {run.first} to {run.last}"
        say(title + (", whose certificate begins there" if run.begins_anew else ""))
    for name, values in settings.items():
        say(f"different {name}: {values[0]} / {values[1]}")
    for letter, run, run_findings in zip("AB", runs, findings, strict=True):
        for finding in (*run_findings, *run.twice()[:1]):
            say(f"{letter}  {finding.what}", "bold red")
    if compared.divergence is None:
        doubt = "according to these records: " if any(findings) else ""
        say(f"{doubt}{_same(compared, runs)}", "" if doubt else "green")
        return
    divergence = compared.divergence
    is_first = divergence.step <= compared.first
    say("different from the first step on" if is_first else f"identical to step {divergence.step - 1}")
    for line in _lines(divergence):
        say(line, "bold red" if line.startswith("they diverge") else "")
    if spot is not None:
        step, value = spot
        place = (
            f"{value.path.removeprefix('replica/')}{list(value.index)}"  # where a checkpoint has model and optimizer
        )
        say(f"saved before step {step}, first difference: {place}: {value.values[0]} / {value.values[1]}")


def _same(compared: RunComparison, runs: list[CertifiedSteps]) -> str:
    ends = [run.finished[0] for run in runs if run.finished and run.finished[0].step == compared.last + 1]
    if len(ends) == 2:
        steps = count(compared.last + 1 - compared.first, "step")
        return f"identical to the last step ({steps}, sha256 {ends[0].sha256})"
    longer = next((run for run in runs if run.last > compared.last), None)
    more = "" if longer is None else f", where one ends and {longer.name} continues to step {longer.last}"
    return f"identical to step {compared.last}{more}"


def _lines(parting: Divergence) -> list[str]:
    if not parting.what:
        lines = [f"they diverge after the last step: the final states before step {parting.step} differ"]
    else:
        lines = [f"they diverge at step {parting.step}: {', '.join(map(_IN_WORDS.__getitem__, parting.what))}"]
    for name, (a, b) in parting.metrics.items():
        lines.append(f"  {name}: {_value(a)} / {_value(b)}")
    if parting.where:
        since = "" if parting.same_until < 0 else f"; it was the same before step {parting.same_until}"
        lines.append(f"  the state differs in {parting.where}{since}")
    if parting.tensors:
        shown, more = ", ".join(parting.tensors[:_MOST_TENSORS]), len(parting.tensors) - _MOST_TENSORS
        rest = f" and {more} more" if more > 0 else ""
        lines.append(f"  different tensors before step {parting.tensors_step}: {shown}{rest}")
    return lines


_IN_WORDS = {"samples": "the samples", "state": "the state before it", "metrics": "the metrics"}


def _value(value: float | None) -> str:
    return "-" if value is None else repr(value)


def _as_dict(
    compared: RunComparison,
    settings: Mapping[str, tuple[Any, Any]],
    spot: tuple[int, ValueDifference] | None,
    findings: Sequence[Sequence[CertificateFinding]],
) -> dict[str, Any]:
    divergence = compared.divergence
    return {
        "same": divergence is None and not any(findings),
        "findings": [[dataclasses.asdict(finding) for finding in run_findings] for run_findings in findings],
        "first_step": compared.first,
        "same_to": compared.last if divergence is None else divergence.step - 1,
        "different_settings": {name: list(values) for name, values in settings.items()},
        "parting": None if divergence is None else dataclasses.asdict(divergence),
        "value": None if spot is None else {"step": spot[0], **dataclasses.asdict(spot[1])},
    }
