"""Flat rows about a run of the study of parallelism, from its report, its records and its workers' notes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from holdfast_lab.studies.base import FAILED, MEASURED, NOT_RUN, Row
from holdfast_lab.studies.parallelism.jobs import (
    HYBRID,
    PIPELINE,
    REPLICATED,
    SHARDED,
    ParallelismOutcome,
    ParallelismRun,
)
from holdfast_lab.studies.stats import median

ORDERS = {
    "revoke_s": ("Revoke",),
    "agree_s": ("Agree",),
    "shrink_s": ("Shrink",),
    "share_s": ("ShareProgress",),
    "transfer_s": ("MoveParts", "AdoptPlacement", "HandOver"),
    "load_s": ("LoadCheckpoint",),
}
"""Columns of times, and the protocol orders whose times they add up."""

CALLS = {
    "MPI_Comm_revoke": "Revoke",
    "MPI_Comm_agree": "Agree",
    "MPI_Comm_shrink": "Shrink",
    "MPI_Allreduce": "ShareProgress",
}
"""MPI calls behind each order, one call per order."""

SAME = ("sha256", "state_sha256", "buffers_sha256", "noise_sha256", "committed")
"""Columns that equal the undisturbed run's if nothing was lost."""

LOAD = "load"
"""The survivors' decision to go back to a checkpoint or to the beginning."""

NOT_COMPARED = "not compared"
"""Value of columns that compare with the undisturbed run if that run failed."""

STRUCTURES = {
    "weights": ("sha256", "sha256 of the final weights and buffers"),
    "optimizer state": ("state_sha256", "sha256 of the weights and the optimizer's momenta"),
    "buffers": ("buffers_sha256", "sha256 of the running averages of batch norm"),
    "random numbers": ("noise_sha256", "a random number logged by each step, and dropout's effect on the weights"),
    "iteration and schedule": (
        "in_order",
        "iterations without a gap; the learning rate depends on them, so they affect the weights",
    ),
    "resident data": ("each_once", "the ledger: every sample of the plan contributes to the weights once"),
}
"""Data structures, each with the columns that tell whether it was lost, and their content."""
OF_PARTS = ("weights", "optimizer state", "buffers")
"""Data structures that are divided where the model is divided."""
COPIES = {
    REPLICATED: "every survivor has it",
    PIPELINE: "a standby has it",
    SHARDED: "a standby has it",
    HYBRID: "the other pipeline has it",
}
"""Source of the dead worker's part of the model."""
ELSEWHERE = {
    "random numbers": "drawn from seed, iteration and slice",
    "iteration and schedule": "every survivor has it",
    "resident data": "read from its storage",
}
"""Source of the other data structures."""


def row_of(job: ParallelismRun, outcome: ParallelismOutcome, undisturbed: Row | None) -> Row:
    """Return the row of a run; ``undisturbed`` is the row of the same run without a kill."""
    about = {**job.about(), "part": "recovery" if job.kills else "undisturbed", "status": MEASURED}
    if not outcome.report or (outcome.failed and not job.kills):
        # With a kill, not to end is a finding: it counts against the claims, and another try would hide it.
        status = NOT_RUN if job.kills else FAILED
        return {**about, "status": status, "completes": False, "why": outcome.failed}
    row = {**about, **_pace(outcome), **_end(outcome)}
    if job.kills:
        row |= _recovery(outcome) | _restored(outcome.report["restored"]) | {"differs": NOT_COMPARED}
    if undisturbed is not None and undisturbed.get("completes"):
        row |= _compared(row, undisturbed)
    return row


def _pace(outcome: ParallelismOutcome) -> Row:
    """Return the seconds of a step; communication is the rest after computing and the optimizer."""
    notes = outcome.notes
    names = ("step_s", "compute_s", "optimizer_s", "communication_s")
    return {name: median([note[name] for note in notes]) if notes and name in notes[0] else None for name in names}


def _end(outcome: ParallelismOutcome) -> Row:
    report = outcome.report
    samples, steps = report["samples"], [record["step"] for record in _commits(outcome)]
    buffers = sorted({note["buffers_sha256"] for note in outcome.notes})
    return {
        "completes": not outcome.failed and report["outcome"] == "done",
        "why": outcome.failed or None,
        "identical": report["replicas"]["identical"],
        "sha256": report["replicas"]["sha256"],
        "state_sha256": report["replicas"]["state_sha256"],
        "buffers_sha256": ",".join(buffers),
        "noise_sha256": _digest([(record["step"], record["metrics"]["noise"]) for record in _commits(outcome)]),
        "iterations": len(steps),
        "in_order": steps == list(range(report["steps_planned"] or 0)),
        "committed": samples["committed"],
        "lost_samples": samples["lost"],
        "each_once": samples["committed"] == samples["planned"] and not samples["lost"] and not samples["repeated"],
        "accuracy": report["metrics"].get("accuracy"),
        "parameters": report["parameters"],
        "files": outcome.files,
        "snapshot_s": _snapshot_s(outcome),
    }


def _commits(outcome: ParallelismOutcome) -> list[dict[str, Any]]:
    """Return each step's last commit: a redone step counts as it was redone."""
    last = {record["step"]: record for record in outcome.of("StepCommitted")}
    return [last[step] for step in sorted(last)]


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _snapshot_s(outcome: ParallelismOutcome) -> float | None:
    """Return for how long saving held the training, either a checkpoint or the snapshot taken at the fault."""
    at_fault = [record["snapshot_s"] for record in outcome.of("Reinitialised")]
    saved = [record["seconds"] for record in outcome.of("CheckpointSaved")]
    return max(at_fault) if at_fault else median(saved) if saved else None


def _recovery(outcome: ParallelismOutcome) -> Row:
    failures = outcome.report["failures"]
    first: Row = failures[0] if failures else {}
    times, orders, rebuilt = first.get("times_s", {}), first.get("orders", {}), outcome.of("Reinitialised")
    return {
        **({} if failures else {"completes": False, "why": outcome.failed or "no survivor recorded the kill"}),
        "decision": first.get("decision"),
        "detect_s": first.get("detect_s"),
        "recover_s": first.get("recover_s"),
        "redone_steps": outcome.report["steps_redone"],
        "restarts": outcome.report["restarts"],
        **{column: _sum(times, names) for column, names in ORDERS.items()},
        "reinit_s": max((record["rebuild_s"] for record in rebuilt), default=None),
        **({"load_s": max(record["load_s"] for record in rebuilt)} if rebuilt else {}),
        **{call: orders.get(order, 0) for call, order in CALLS.items()},
    }


def _restored(restored: Sequence[Row]) -> Row:
    """Return which parts were restored from earlier iterations, and the age of their blocks."""
    blocks = sum(one["blocks"] for one in restored)
    if not blocks:
        return {}
    return {
        "restored_parts": len(restored),
        "restored_blocks": blocks,
        "restored_age": sum(one["stale_steps"]["mean"] * one["blocks"] for one in restored) / blocks,
        "restored_oldest": max(one["stale_steps"]["max"] for one in restored),
        "restored_from": ", ".join(sorted({one["source"] for one in restored})),
    }


def _sum(times: dict[str, float], names: Sequence[str]) -> float | None:
    found = [times[name] for name in names if name in times]
    return sum(found) if found else None


def _compared(row: Row, undisturbed: Row) -> Row:
    both = row["accuracy"] is not None and undisturbed["accuracy"] is not None
    return {
        "same_bits": row["state_sha256"] == undisturbed["state_sha256"],
        "differs": ", ".join(name for name in SAME if row[name] != undisturbed[name]) or "nothing",
        "accuracy_undisturbed": undisturbed["accuracy"],
        "accuracy_loss": undisturbed["accuracy"] - row["accuracy"] if both else None,
    }


# -- the paper's data policy


def data_row(job: ParallelismRun, outcome: ParallelismOutcome) -> Row:
    """Return what survivors reread after the kill of a worker with data blocks, and the blocks held at the end."""
    about = {**job.about(), "part": "data", "status": MEASURED}
    if outcome.failed:
        return {**about, "status": FAILED, "why": outcome.failed}
    first_kill = min(step for _, step in job.kills)
    again = [read for note in outcome.notes for read in note["reads"] if read["step"] >= first_kill]
    held = sorted(block for note in outcome.notes for block in note["held"])
    blocks = job.scale.slices
    lost = len(job.kills) * job.scale.samples // job.workers
    return {
        **about,
        "blocks": blocks,
        "reread_s": max((read["seconds"] for read in again), default=0.0),
        "reread_samples": sum(read["samples"] for read in again),
        "resident_lost": lost,
        "held_once": held == list(range(blocks)),
        "each_once": outcome.report["samples"]["repeated"] == 0 and outcome.report["samples"]["lost"] == 0,
    }


# -- what needs a checkpoint


def structure_rows(
    kind: str, kept: Row, saved: Row | None = None, bare: Row | None = None, backup: Row | None = None
) -> list[Row]:
    """Return, for each data structure, whether it needs a checkpoint.

    Args:
        kind: How the model is divided.
        kept: A run in which a worker was killed, with Holdfast's default standbys and no checkpoint.
        saved: The same without standbys (``--mirror 0``), and with checkpoints; None where every worker has the whole
            model, or a pipeline replica.
        bare: As ``saved``, without checkpoints; None if that was not run.
        backup: As ``kept``, with delta standbys only, which lag some iterations (``partial``); None as for ``bare``.
    """
    return [_structure(kind, name, kept, saved, bare, backup) for name in STRUCTURES]


def _structure(kind: str, name: str, kept: Row, saved: Row | None, bare: Row | None, backup: Row | None) -> Row:
    column, how = STRUCTURES[name]
    intact = bool(kept[column]) if column in ("in_order", "each_once") else column not in kept["differs"].split(", ")
    in_memory = intact and not _went_back(kept)
    is_lost = saved is not None and name in OF_PARTS and _went_back(saved)
    needs = "yes" if not in_memory else "without a copy" if is_lost else "no"
    copy = COPIES[kind] if name in OF_PARTS else ELSEWHERE[name]
    told = [f"no: {copy}" if in_memory else "yes"]
    for run, words in ((saved, "without it yes"), (bare, "without both")):
        if is_lost and run is not None:
            told.append(f"{words}, {run['redone_steps']} of {run['kill_step'] + 1} iterations redone")
    if name in OF_PARTS and backup is not None and backup.get("restored_from") == "backup" and not _went_back(backup):
        told.append(f"with a delta standby no, but {backup['restored_age']:.3g} iterations old")
    return {
        "part": "structures",
        "status": MEASURED,
        "kind": kind,
        "structure": name,
        "how": how,
        "in_memory": in_memory,
        "copy": copy,
        "needs": needs,
        kind: "; ".join(told),
    }


def _went_back(row: Row) -> bool:
    """Return whether no worker had the lost state, so that all went back to a checkpoint or to the beginning."""
    return bool(row["restarts"]) or row["decision"] == LOAD
