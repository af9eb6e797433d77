"""The state of a run in one sentence, and how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.base.formatting import count, listing, number, seconds
from holdfast.errors import STOPPED
from holdfast.observe.monitor.membership import Membership

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended.

    Args:
        end_s: Seconds since its begin.
        exit_code: That of its launcher, None if it is not known.
        why: Why it failed, "" if it did not, or that is not known.
        outcome: As in the report: ``done``, ``stopped``, ``gave-up`` or ``failed``; "" if it is not known.
    """

    end_s: float
    exit_code: int | None = None
    why: str = ""
    outcome: str = ""


def level_and_sentence(members: Membership, ended: Ended | None) -> tuple[str, str]:
    """Return the level and the sentence.

    Args:
        members: The workers.
        ended: How the run ended, None while it runs.
    """
    if ended is not None:
        return _of_end(members, ended)
    lanes, progress = members.lanes, members.progress
    training, starting = lanes.count("training", "recovering"), lanes.count("starting")
    if not progress.is_training and (starting or not training):
        ready = training + lanes.count("spare")
        what = f"Restarting the job, restart {progress.restarts}" if progress.restarts else "Starting"
        if not ready + starting:
            return "busy", f"{what}: no worker is ready."
        return "busy", f"{what}: {ready} of {count(ready + starting, 'worker')} ready."
    if not training:
        return ("done", "The workers have finished.") if members.outcome else ("bad", "No worker is training.")
    if members.is_recovering and (lanes.count("recovering") or members.recoveries.rows):
        return "busy", _of_recovery(members)
    of = f" of {number(progress.planned)}" if progress.planned else ""
    wanted = max(members.wanted, 1)
    workers = count(training, "worker") if training >= wanted else f"{training} of {count(wanted, 'worker')}"
    more = f"; {count(starting, 'worker')} starting" if starting else ""
    return "good" if training >= wanted else "warning", f"Training: step {number(progress.step)}{of}, {workers}{more}."


def _of_recovery(members: Membership) -> str:
    if members.lanes.count("recovering"):
        return f"Recovering at step {number(members.progress.step)}: a worker has failed, and the survivors agree on what to do."
    row = members.recoveries.rows[-1]
    lost = _ranks(row.lost)
    what = f"after the loss of {lost}" if row.lost else "after a change of the membership"
    return f"Resuming at step {number(row.step)} {what}."


def _of_end(members: Membership, ended: Ended) -> tuple[str, str]:
    lost = members.lanes.count("lost")
    after = f"after {count(members.progress.step, 'step')} in {seconds(ended.end_s)}"
    outcome = ended.outcome or members.outcome or "failed"
    if ended.exit_code not in (None, 0, STOPPED):
        outcome = "failed"
    if outcome == "failed":
        why = ended.why or members.error
        return "bad", f"Failed {after}{': ' + why if why else '.'}"
    if outcome == "gave-up":
        return "bad", f"Gave up {after}: too few workers."
    if outcome == "stopped":
        return "warning", f"Stopped on request {after}{'; its state was saved' if ended.exit_code == STOPPED else ''}."
    losses = f"; {count(lost, 'worker')} lost" if lost else ""
    return "done", f"Done {after}{losses}."


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} workers"
    return f"{'worker' if len(ranks) == 1 else 'workers'} {listing(ranks)}"
