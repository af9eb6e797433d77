"""``holdfast verify``: checks the certificate of a run, and replays its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from holdfast.cli.tables import count, print_json, say, warn

if TYPE_CHECKING:
    from holdfast.tools.certificate import CertificateFinding, CertifiedSteps
    from holdfast.tools.divergence import Divergence

_WRONG = 3
"""Exit code if a record is inconsistent, or a step is not reproduced."""
_MOST = 10
"""Maximum number of findings to print."""
_NAMED = 5
"""Maximum number of tensors to name."""


def verify(
    directory: Annotated[Path, Argument(metavar="DIR", help="The report directory of a run.", show_default=False)],
    *,
    start: Annotated[
        int | None, Option("--from", metavar="STEP", min=0, help="First step to replay [default: the first].")
    ] = None,
    stop: Annotated[
        int | None, Option("--to", metavar="STEP", min=0, help="Last step to replay [default: the last].")
    ] = None,
    script: Annotated[Path | None, Option(metavar="FILE", help="Path of the script, if it has moved.")] = None,
    trust: Annotated[
        bool, Option("--trust", help="Run the script that the report names, although it was not run here.")
    ] = False,
    records_only: Annotated[
        bool, Option("--records-only", help="Check only the hash chain, without a replay.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> int:
    """Check the certificate of a run: first its records, then by replaying its steps on one process.

    Recomputes the hash chain from the records of each step, which detects altered, dropped or repeated lines. Then runs
    the script from the newest checkpoint before --from, or from the beginning, in a temporary directory, with the run's
    settings and arguments, and compares each step. Exits with 0 if everything matches the certificate, else with 3.

    This executes the script. A script that this user has not run here with these arguments is only printed, unless
    --script names it or --trust is given.

    Example: holdfast verify out --from 20 --to 40
    """
    from holdfast.records.files import load_events
    from holdfast.tools.certificate import CertifiedSteps
    from holdfast.tools.replay import load_job, replay_steps

    report = load_job(directory)
    run = CertifiedSteps(load_events(directory), str(directory))
    findings = run.check()
    result: dict[str, Any] = {"records": [dataclasses.asdict(finding) for finding in findings], "replay": None}
    if not as_json:
        _show_records(run, findings)
    wrong = bool(findings)
    if not findings:
        workers = run.check_workers()
        result["workers"] = [dataclasses.asdict(finding) for finding in workers]
        wrong = bool(workers)
        if not as_json:
            _show_findings(workers)
        if not records_only:
            result["replay"] = replay = replay_steps(run, report, script, start, stop, trusted=trust, tell=warn)
            wrong |= replay["parting"] is not None
            if not as_json:
                _show_replay(replay)
    if as_json:
        print_json(result | {"verified": not wrong})
    return _WRONG if wrong else 0


# -- output


def _show_records(run: CertifiedSteps, findings: Sequence[CertificateFinding]) -> None:
    _show_findings(findings)
    if not findings:
        anew = "; the chain begins there, because the state that it resumed from had none" if run.begins_anew else ""
        say(f"{run.name}: the hash chain of steps {run.first} to {run.last} is valid{anew}")
    for finding in run.twice()[:1]:
        say(f"{finding.what}; the last record counts")


def _show_findings(findings: Sequence[CertificateFinding]) -> None:
    for finding in findings[:_MOST]:
        say(finding.what, "bold red")
    if len(findings) > _MOST:
        say(f"and {count(len(findings) - _MOST, 'other finding')}")


def _show_replay(replay: dict[str, Any]) -> None:
    source = f"from the checkpoint before step {replay['first']}" if replay["checkpoint"] else "from the beginning"
    divergence: Divergence | None = replay["parting"]
    if divergence is None:
        end = ", and the final state" if replay["at_end"] else ""
        say(f"verified steps {replay['first']} to {replay['last']}{end}, replayed {source}", "green")
        return
    for line in _lines(divergence, source):
        say(line, "bold red" if not line.startswith(" ") else "")


def _lines(parting: Divergence, source: str) -> list[str]:
    if not parting.what:
        lines = [
            f"the final state before step {parting.step} is not reproduced, although all steps are; replayed {source}"
        ]
    else:
        names = {"samples": "its samples", "state": "the state before it", "metrics": "its metrics"}
        what = ", ".join(names[name] for name in parting.what)
        lines = [f"step {parting.step} is not reproduced: {what}; replayed {source}"]
    for name, (recorded, again) in parting.metrics.items():
        lines.append(f"  {name}: {recorded!r} in the records, {again!r} in the replay")
    if parting.where:
        since = ""
        if parting.same_until >= 0:
            since = f"; it was last correct before step {parting.same_until}, and was altered in between"
        lines.append(f"  the state in {parting.where}{since}")
    if parting.workers:
        whose = f"worker{'s' if len(parting.workers) > 1 else ''} {', '.join(map(str, parting.workers))}"
        more = f" and {len(parting.tensors) - _NAMED} more" if len(parting.tensors) > _NAMED else ""
        which = f"{', '.join(parting.tensors[:_NAMED])}{more}"
        lines.append(f"  before step {parting.tensors_step} {whose} had other values in {which}")
    return lines
