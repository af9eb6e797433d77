"""The files that a run writes to its report directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.faults.plan import PHASES, Fault, FaultPlan
from holdfast.launch.command_line import command_line
from holdfast.launch.displays import Display
from holdfast.launch.provenance import note
from holdfast.launch.record_bus import RunState
from holdfast.records.files import load_events, read_run
from holdfast.records.types import FaultFired, Record


def records_of(run: RunState, *, has_all: bool) -> list[Record]:
    """Return the records of a run: those in the report directory if files of the run directory were removed (not ``has_all``)."""
    report_dir, events = run.job.report_dir, run.events
    if not has_all and report_dir is not None and events is not None and events.has_all():
        return load_events(report_dir)
    return read_run(run.paths.run_dir)


def write_results(
    run: RunState, records: Sequence[Record], plan: FaultPlan, displays: Sequence[Display], facts: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return the report, and why it could not be written: "" if it was, or if the job has no report directory.

    Writes the report, the records, the faults, and what ``displays`` add. ``facts`` are what the report says of the run
    beside its records, with the :func:`~holdfast.launch.provenance.job_provenance` of when it was started as ``job``.
    """
    from holdfast.summary.build import build_report
    from holdfast.summary.files import write_report

    job, specs, events = run.fleet.job, plan.to_specs(), run.events
    arguments: dict[str, Any] = {
        **facts,
        "started": range(job.workers),
        "seed": job.settings.seed,
        "nodes": job.nnodes,
        "faults_not_fired": [spec for number, spec in enumerate(specs) if number not in run.state.fired],
        "command": command_line(job, faults=specs),
    }
    if job.report_dir is None:
        return build_report(records, **arguments), ""
    try:
        has_events = events is not None and events.is_final()
        report = write_report(records, job.report_dir, has_events=has_events, **arguments)
        write_plan(records, plan, job.report_dir / "plan.json")
        note(facts["job"])
        for display in displays:
            display.write(job)
    except OSError as error:
        return build_report(records, **arguments), f"cannot write {error.filename or job.report_dir}: {error.strerror}"
    except ConfigError as error:  # not an error in the command line of the run
        return build_report(records, **arguments), str(error)
    return report, ""


def write_plan(records: Sequence[Record], plan: FaultPlan, path: Path) -> None:
    """Write the injected faults, with their actual places, and the faults that were not reached, as a plan to replay."""
    struck = {record.fault: record for record in records if isinstance(record, FaultFired)}
    faults = [_as_struck(fault, struck.get(number)) for number, fault in enumerate(plan.faults)]
    faults += [
        Fault(record.kind, record.rank, max(0, record.step), record.phase if record.phase in PHASES else "forward")
        for number, record in sorted(struck.items())
        if number >= len(plan.faults)
    ]
    whole = FaultPlan(tuple(faults), plan.seed)
    document = json.loads(whole.to_json()) | {"specs": whole.to_specs(), "struck": sorted(struck)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _as_struck(fault: Fault, record: FaultFired | None) -> Fault:
    if record is None or fault.bucket is not None:
        return fault
    phase = record.phase if record.phase in PHASES else fault.phase
    return dataclasses.replace(fault, step=record.step, phase=phase)
