"""Judges the outcome of a plan: right, missed, or one class of what is wrong."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign import jobs
from campaign.attacks import KINDS
from campaign.attacks.base import End
from campaign.plan import WATCHER, WORKER, Plan
from campaign.runner import Ended, Outcome, name_of_code
from holdfast.cli.signals import INTERRUPTED, NO_JOB

RIGHT, MISSED = "right", "missed"
NOT_JUDGED = "not judged"
"""An error of the campaign itself."""
WRONG = (
    "hang",
    "left-overs",
    "traceback",
    "wrong hash",
    "samples",
    "false success",
    "stopped",
    "no clear line",
    "lost checkpoint",
    "not resumed",
)
"""Classes of what is wrong, in the order in which they are looked for."""

_CLEAR = re.compile(r"^(error: |holdfast: stopped|stopped )", re.MULTILINE)
_OURS = re.compile(r'/holdfast/\S+", line \d+, in (?!<module>)')
"""A function of Holdfast in a traceback."""
MANY_DEATHS = 3
"""So many deaths may hit the same slice: then the job stops, and names its samples."""


@dataclass(frozen=True)
class Verdict:
    """What is right or wrong with a plan: ``kind`` is :data:`RIGHT`, :data:`MISSED` or one of :data:`WRONG`."""

    kind: str
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind not in (RIGHT, MISSED)


def allowed_end(plan: Plan) -> End:
    """The worst end that is right for a plan."""
    worst = max((KINDS[each.kind].end(each, plan.job) for each in plan.attacks), default=End.SURVIVES)
    struck = [each.victim for each in plan.attacks if each.role in (WORKER, WATCHER)]
    ranks = {victim.rpartition(" ")[2] for victim in struck}
    if len(ranks) >= plan.job.workers + plan.job.spares or len(struck) >= MANY_DEATHS:
        return max(worst, End.MAY_STOP)
    return worst


def judge(outcome: Outcome, cache: Path) -> Verdict:
    """Judge a plan; the hash of the undisturbed run is kept in the folder ``cache``."""
    for found in outcome.found:
        return Verdict(found.kind, str(found))
    last = outcome.resumed or outcome.first
    leave = any(KINDS[each.kind].leaves_files(each) for each in outcome.plan.attacks)
    allowed = allowed_end(outcome.plan)
    verdicts = [_of_run(outcome.first, "", allowed, is_last=outcome.resumed is None, may_leave=leave)]
    if outcome.resumed:
        verdicts.append(_of_run(outcome.resumed, "resumed: ", End.SURVIVES, is_last=True, may_leave=leave))
    verdicts += [
        _of_resume(outcome),
        *(_of_result(outcome, last, cache) if last.code == 0 else []),
    ]
    wrong = [verdict for verdict in verdicts if verdict is not None]
    if wrong:
        return min(wrong, key=lambda verdict: WRONG.index(verdict.kind))
    return Verdict(RIGHT if any(outcome.landed) or not outcome.landed else MISSED, _summary(outcome))


def _of_run(ended: Ended, which: str, allowed: End, *, is_last: bool, may_leave: bool) -> Verdict | None:
    """What is wrong with the end of one run, apart from its result."""
    end = f"{which}{name_of_code(ended.code)}"
    if ended.code is None:
        return Verdict("hang", f"{end}\n{ended.waits}\n{ended.said[-1500:]}")
    if ended.left:
        return Verdict("left-overs", f"{end}: " + "\n".join(ended.left))
    if (
        ended.files and not may_leave and (ended.code >= 0 or is_last)
    ):  # what a killed launcher left is removed by the next one
        return Verdict("left-overs", f"{end}: {', '.join(ended.files)}")
    if _ended_in_python(ended):
        return None
    if (ended.code == INTERRUPTED) != (NO_JOB in ended.said.splitlines()):
        return Verdict("no clear line", f"{end}: {ended.said[-1500:]}")
    if "Traceback (most recent call last)" in ended.said:
        return Verdict("traceback", f"{end}: {_excerpt(ended.said, 'Traceback')}")
    if ended.code == 0:
        return None
    if which:
        return Verdict("not resumed", f"{end}: {ended.said[-1500:]}")
    if allowed == End.SURVIVES:
        return Verdict("stopped", f"{end}: {ended.said[-1500:]}")
    if ended.code > 0 and ended.code != INTERRUPTED and not _CLEAR.search(ended.said):
        return Verdict("no clear line", f"{end}: {ended.said[-1500:]}")
    return None


def _ended_in_python(ended: Ended) -> bool:
    """Whether Ctrl-C ended the launcher while it was nothing but Python that starts, or imports the package itself."""
    is_start = ended.code == -signal.SIGINT or "Fatal Python error: init_import_site" in ended.said
    return is_start and "KeyboardInterrupt" in ended.said and not _OURS.search(ended.said)


def _of_resume(outcome: Outcome) -> Verdict | None:
    """Whether a resumed run began where the newest intact checkpoint is."""
    if outcome.resumed is None or outcome.intact is None or not outcome.resumed.events:
        return None
    began = [event["step"] for event in outcome.resumed.of_kind("RunStarted")]
    if began and min(began) < outcome.intact:
        return Verdict("lost checkpoint", f"step {outcome.intact} was intact, and it began at step {min(began)}")
    return None


def _of_result(outcome: Outcome, last: Ended, cache: Path) -> list[Verdict]:
    """What is wrong with the result of a run that says that it is done."""
    job, report = outcome.plan.job, last.report
    if report is None or report["outcome"] != "done":
        return [Verdict("false success", f"exit 0, and the report says {report and report['outcome']}")]
    found = []
    was_undisturbed = not any(outcome.landed) or outcome.resumed is not None
    is_exact = jobs.is_exact(job, () if job.script == "ddp" and was_undisturbed else outcome.plan.attacks)
    if is_exact and (wrong := _wrong_hash(outcome, last, cache)):
        found.append(Verdict("wrong hash", wrong))
    if job.script == "ddp":
        hashes = jobs.hash_in(last.said)
        found += [Verdict("wrong hash", f"ranks differ: {hashes}")] if "/" in hashes else []
        return found
    samples = report["samples"]
    if is_exact and (samples["lost"] or samples["repeated"]):
        found.append(Verdict("samples", str(samples)))
    if is_exact and samples["committed"] != samples["planned"]:
        found.append(Verdict("false success", f"exit 0, and {samples}"))
    if report["replicas"]["identical"] is not True:
        found.append(Verdict("wrong hash", f"the replicas differ: {report['replicas']}"))
    return found


def _wrong_hash(outcome: Outcome, last: Ended, cache: Path) -> str:
    """In words, which hash a run has instead of the right one; "" if it is right."""
    job = outcome.plan.job
    wanted = jobs.undisturbed(jobs.case_of(job), cache)
    assert last.report is not None
    found = jobs.hash_in(last.said) if job.script == "ddp" else last.report["replicas"]["state_sha256"]
    return "" if found == wanted else f"{found} instead of {wanted}"


def _summary(outcome: Outcome) -> str:
    """What happened, in a line."""
    first = outcome.first
    codes: dict[Any, Any] = {event["rank"]: event["exit_code"] for event in first.of_kind("WorkerEnded")}
    restarts = len(first.of_kind("JobRestarted"))
    end = name_of_code(first.code) + (f", resumed from {outcome.intact}" if outcome.resumed else "")
    return f"{end}; workers {codes}; {restarts} restarts; {'; '.join(outcome.notes) or 'nothing landed'}"


def _excerpt(said: str, word: str) -> str:
    at = said.index(word)
    return said[max(0, at - 300) : at + 2000]
