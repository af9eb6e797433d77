"""Judges the outcome of a plan: right, missed, or one class of what is wrong."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign import jobs
from campaign.attacks import KINDS
from campaign.attacks.base import End
from campaign.plan import WATCHER, WORKER, Attack, Job
from campaign.runner import Ended, Outcome, name_of_code
from holdfast.cli import INTERRUPTED, NO_JOB

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
_SCRIPT = re.compile(r'  File "[^"]+/train_\w+\.py", line ')
"""A traceback begins in the script: what Holdfast calls the script with is not in it."""
_FRAME = re.compile(r'^(?:\[\d+\] )?  File "([^"]+)", line ', re.MULTILINE)
"""A frame, also in the output of a rank."""
_LIBRARY = re.compile(r"^<|/python3\.\d+/(?!site-packages)|/site-packages/(torch|numpy)/")
MANY_DEATHS = 3
"""So many deaths may hit the same slice: then the job stops, and names its samples."""
CODES: dict[End, frozenset[int]] = {
    End.SURVIVES: frozenset(),
    End.MAY_STOP: frozenset((1, 4, 93)),
    End.REFUSES: frozenset((1, 2, 93)),
}
"""Exit codes, other than 0, with which a job may end; of several attacks, those of each."""
_PYTHON_BEGINS = (
    "Fatal Python error: init_",
    "Fatal Python error: error evaluating path",
    'File "<frozen site>"',
    "Could not import runpy module",
)
"""Python ends before it has run anything of Holdfast."""
HARM = frozenset(("damage", "removed", "disk-full", "disk-read-only", "disk-error"))
"""Attacks after which a checkpoint that was complete may be gone, or unreadable."""


@dataclass(frozen=True)
class Verdict:
    """What is right or wrong with a plan: ``kind`` is :data:`RIGHT`, :data:`MISSED` or one of :data:`WRONG`."""

    kind: str
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind not in (RIGHT, MISSED)


def allowed_ends(job: Job, acted: tuple[Attack, ...]) -> set[End]:
    """The ends that are right for a job after what acted on it."""
    ends = {End.SURVIVES, *(KINDS[each.kind].end(each, job) for each in acted)}
    struck = [each for each in acted if each.role in (WORKER, WATCHER)]
    if len({each.rank for each in struck}) >= job.workers + job.spares or len(struck) >= MANY_DEATHS:
        ends.add(End.MAY_STOP)
    return ends


def allowed_codes(job: Job, acted: tuple[Attack, ...]) -> frozenset[int]:
    """The exit codes of the launcher that are right beside 0."""
    codes = frozenset().union(*(CODES[end] for end in allowed_ends(job, acted)))
    return codes.union(*(KINDS[each.kind].codes(each) for each in acted))


def judge(outcome: Outcome, cache: Path) -> Verdict:
    """Judge a plan; the hash of the undisturbed run is kept in the folder ``cache``."""
    for found in outcome.found:
        return Verdict(found.kind, str(found))
    last = outcome.resumed or outcome.first
    acted = outcome.acted()
    leave = any(KINDS[each.kind].leaves_files(each) for each in acted)
    fails = any(KINDS[each.kind].fails_script(each) for each in acted)
    allowed = allowed_codes(outcome.plan.job, acted)
    is_last = outcome.resumed is None
    verdicts = [_of_run(outcome.first, "", allowed, is_last=is_last, may_leave=leave, script_may_fail=fails)]
    verdicts.append(_of_second_launcher(outcome.first, outcome.plan.job, acted))
    if outcome.resumed:
        verdicts.append(_of_run(outcome.resumed, "resumed: ", frozenset(), is_last=True, may_leave=leave))
        verdicts.append(_of_second_launcher(outcome.resumed, outcome.plan.job, ()))
    verdicts += [
        _of_resume(outcome),
        *(_of_restarts(outcome, ended) for ended in (outcome.first, outcome.resumed) if ended),
        *(_of_result(outcome, last, cache) if last.code == 0 else []),
        *(_of_other(job, found, cache) for job, found in outcome.others),
    ]
    wrong = [verdict for verdict in verdicts if verdict is not None]
    if wrong:
        return min(wrong, key=lambda verdict: WRONG.index(verdict.kind))
    is_missed = outcome.landed and not any(outcome.landed) and outcome.first.code == 0
    return Verdict(MISSED if is_missed else RIGHT, _summary(outcome))


def _of_run(
    ended: Ended, which: str, allowed: frozenset[int], *, is_last: bool, may_leave: bool, script_may_fail: bool = False
) -> Verdict | None:
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
    if _interrupted_python(ended) or (script_may_fail and _python_could_not_begin(ended)):
        return None
    if (ended.code == INTERRUPTED) != (NO_JOB in ended.said.splitlines()):
        return Verdict("no clear line", f"{end}: {ended.said[-1500:]}")
    if "Traceback (most recent call last)" in ended.said and not (script_may_fail and _is_of_script(ended)):
        return Verdict("traceback", f"{end}: {_excerpt(ended.said, 'Traceback')}")
    if ended.code == 0:
        return None
    if which:
        return Verdict("not resumed", f"{end}: {ended.said[-1500:]}")
    if ended.code not in allowed:
        return Verdict("stopped", f"{end}: {ended.said[-1500:]}")
    if ended.code > 0 and ended.code != INTERRUPTED and not _CLEAR.search(ended.said):
        return Verdict("no clear line", f"{end}: {ended.said[-1500:]}")
    return None


def _interrupted_python(ended: Ended) -> bool:
    """Whether Ctrl-C ended the launcher while it was nothing but Python that starts, or imports the package itself."""
    is_start = ended.code == -signal.SIGINT or "Fatal Python error: init_" in ended.said
    return is_start and "KeyboardInterrupt" in ended.said and not _OURS.search(ended.said)


def _python_could_not_begin(ended: Ended) -> bool:
    """Whether the launcher ended while Python imported its own modules: nothing of Holdfast had run yet."""
    is_start = any(each in ended.said for each in _PYTHON_BEGINS)
    is_loader = ended.code == 127 and "error while loading shared libraries" in ended.said
    return is_loader or (ended.code == 1 and is_start and "/holdfast/" not in ended.said)


def _is_of_script(ended: Ended) -> bool:
    """Whether each traceback is one of the script's own statements, behind the one line that names the error."""
    _, *tracebacks = ended.said.split("Traceback (most recent call last):\n")
    begins = [_SCRIPT.match(each) for each in tracebacks]
    deepest = [_deepest(each) for each in tracebacks]
    return any(begins) and "error: rank " in ended.said and not any("/holdfast/" in each for each in deepest)


def _deepest(traceback: str) -> str:
    """The file of the deepest frame that is none of Python, torch or numpy; "" if there is none."""
    files = [name for name in _FRAME.findall(traceback) if not _LIBRARY.search(name)]
    return files[-1] if files else ""


def _of_resume(outcome: Outcome) -> Verdict | None:
    """Whether all that was saved is intact, and a resumed run began where the newest intact checkpoint is."""
    if outcome.resumed is None:
        return None
    saved = _newest_saved(outcome.first.events)
    intact = -1 if outcome.intact is None else outcome.intact
    if intact < saved and not _is_harmed(outcome):
        return Verdict("lost checkpoint", f"step {saved} was saved, and the newest intact is {outcome.intact}")
    began = [event["step"] for event in outcome.resumed.of_kind("RunStarted")]
    if outcome.resumed.code == 0 and not began:
        return Verdict("false success", "exit 0, and the resumed run has no record that it began")
    if began and outcome.intact is not None and min(began) < outcome.intact:
        return Verdict("lost checkpoint", f"step {outcome.intact} was intact, and it began at step {min(began)}")
    return None


def _of_second_launcher(ended: Ended, job: Job, acted: tuple[Attack, ...]) -> Verdict | None:
    """What is wrong with the end of the second node's launcher, if there is one.

    It ends as the first does, or with 0 or 1: its node left, was cut off, or went on alone. A job that is done is done on
    both, unless what is between the nodes was attacked.
    """
    if ended.second is None or ended.second.code is None or ended.code is None:
        return None
    code, may_part = ended.second.code, any("nodes" in KINDS[each.kind].takes for each in acted)
    end = f"the second launcher ended with {name_of_code(code)}, the first with {name_of_code(ended.code)}"
    allowed = {0, ended.code} | ({1} if ended.code or may_part else set()) | allowed_codes(job, acted)
    if code not in allowed:
        return Verdict("stopped", f"{end}: {ended.said[-1500:]}")
    if code == 1 and not _CLEAR.search(ended.said):
        return Verdict("no clear line", f"{end}: {ended.said[-1500:]}")
    return None


def _newest_saved(events: Sequence[Mapping[str, Any]]) -> int:
    """The newest step that was saved; a guard that heals removes what was saved after the state to which all roll back."""
    saved: list[int] = []
    for event in sorted(events, key=lambda event: float(event.get("t_s", 0))):
        if event["event"] == "CheckpointSaved":
            saved.append(event["step"])
        elif event["event"] == "Recovered" and event["decision"] == "heal":
            saved = [step for step in saved if step <= event["step"]]
    return max(saved, default=-1)


def _of_restarts(outcome: Outcome, ended: Ended) -> Verdict | None:
    """Whether each restart within a run began where the newest checkpoint was that the run had saved before."""
    if outcome.plan.job.script == "ddp" or _is_harmed(outcome):
        return None
    so_far: list[dict[str, Any]] = []
    wanted = 0
    for event in sorted(ended.events, key=lambda event: float(event.get("t_s", 0))):
        so_far.append(event)
        if event["event"] == "JobRestarted":
            wanted = _newest_saved(so_far)
        elif event["event"] == "RunStarted" and event["step"] < wanted:
            return Verdict("lost checkpoint", f"step {wanted} was saved, and a restart began at step {event['step']}")
    return None


def _is_harmed(outcome: Outcome) -> bool:
    return any(each.kind in HARM for each in outcome.acted())


def _of_result(outcome: Outcome, last: Ended, cache: Path) -> list[Verdict]:
    """What is wrong with the result of a run that says that it is done."""
    job, report = outcome.plan.job, last.report
    if report is None or report["outcome"] != "done":
        return [Verdict("false success", f"exit 0, and the report says {report and report['outcome']}")]
    found = []
    is_new = job.script == "ddp" and outcome.resumed is not None  # it has no checkpoints
    is_exact = jobs.is_exact(job, () if is_new else outcome.acted())
    if job.flip and len(report["workers"]["ranks_finished"]) == 1:
        is_exact = False  # it may have been alone when its bits flipped, with no replica to compare them with
    if is_exact and (wrong := _wrong_hash(outcome, last, cache)):
        found.append(Verdict("wrong hash", wrong))
    if job.script == "ddp":
        hashes = jobs.hash_in(last.said)
        found += [Verdict("wrong hash", f"ranks differ: {hashes}")] if "/" in hashes else []
        found += [] if hashes else [Verdict("false success", "exit 0, and no rank has printed its state")]
        return found
    samples = report["samples"]
    if is_exact and (samples["lost"] or samples["repeated"]):
        found.append(Verdict("samples", str(samples)))
    if is_exact and samples["committed"] != samples["planned"]:
        found.append(Verdict("false success", f"exit 0, and {samples}"))
    if report["replicas"]["identical"] is not True:
        found.append(Verdict("wrong hash", f"the replicas differ: {report['replicas']}"))
    return found


def _of_other(job: Job, found: str, cache: Path) -> Verdict | None:
    """What is wrong with the hash of another job on the machine."""
    wanted = jobs.undisturbed(jobs.case_of(job), cache)
    return Verdict("wrong hash", f"another job: {found} instead of {wanted}") if found != wanted else None


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
