"""How the rows of the study of parallelism are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_lab.pages.study import grouped
from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.parallelism.elastic import PROCESS
from holdfast_lab.studies.parallelism.jobs import KINDS, PARTIAL
from holdfast_lab.studies.parallelism.rows import CALLS

_BY = ["network", "kind", "strategy", "form", "workers", "kill_step"]
_IF_THEY_DIFFER = ("network", "form")
"""Columns that are left out where all runs have the same."""

_TIMES = [
    ["detect_s", "detect"],
    ["revoke_s", "revoke"],
    ["agree_s", "agree"],
    ["shrink_s", "shrink"],
    ["share_s", "share"],
    ["transfer_s", "parts"],
    ["reinit_s", "rebuild"],
    ["load_s", "load"],
]


def sections(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the sections of the page."""
    killed = [row for row in rows if row["part"] == "recovery" and row["status"] == MEASURED]
    by = [name for name in _BY if name not in _IF_THEY_DIFFER or len({row[name] for row in killed}) > 1]
    return [
        _answers([row for row in killed if _in_figure(row, killed)], by),
        _times_figure(rows, killed[0]["network"] if killed else None),
        _times_table(by),
        _end_table(by),
        _restored_table(),
        _calls_table(),
        _needs_table(),
        _structures_table(),
        _bare_table(),
        _pace_table(),
        _step_figure(rows),
        _step_table(),
        _data_table(),
        _elastic_figure(rows),
        _elastic_table(),
        _joined_table(),
        _not_run_table(),
    ]


def _in_figure(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a run is of the first network, its dead not replaced."""
    return bool(row["network"] == rows[0]["network"] and row["form"] == "survivors only")


def _answers(rows: Sequence[Row], by: Sequence[str]) -> dict[str, Any]:
    """Say for each parallelism which way of recovering had the next iteration soonest, and what the others took."""
    items = []
    killed = sorted((row for row in rows if row.get("recover_s")), key=lambda row: float(row["recover_s"]))
    for kind in dict.fromkeys(row["kind"] for row in rows if row.get("recover_s")):
        groups = grouped([row for row in killed if row["kind"] == kind], ["strategy"]).values()
        best, *slower = sorted((group[(len(group) - 1) // 2] for group in groups), key=lambda row: row["recover_s"])
        others = [
            f"{row['strategy']} {row['recover_s'] / best['recover_s']:.1f} times as long, {_again(row)}"
            for row in slower
        ]
        text = f"{kind}: {best['strategy']} had the next iteration done {best['recover_s']:.3f} s after the kill, {_again(best)}"
        text += f"; {'; '.join(others)}" if others else ""
        items.append({"text": f"{text}.", "section": "times", "row": [str(best[name]) for name in by]})
    return {
        "kind": "list",
        "id": "answers",
        "title": "What a kill cost, in a line for each parallelism: of each strategy the run in the middle",
        "items": items,
    }


def _again(row: Mapping[str, Any]) -> str:
    steps = row["redone_steps"]
    words = "no iteration done again" if not steps else f"{steps} iteration{'' if steps == 1 else 's'} done again"
    if row.get("restored_parts"):
        words += f", a part {row['restored_age']:.3g} iterations old"
    return words


def _bars(rows: Sequence[Row], section: dict[str, Any]) -> dict[str, Any]:
    """Return a picture of bars that says in its note of how many runs a bar is, and what its line is."""
    chosen = [row for row in rows if all(row.get(name) == value for name, value in section["where"].items())]
    counts = [len(group) for group in grouped(chosen, section["by"]).values()]
    if max(counts, default=1) == 1:
        told = "A bar is one run, so that there is no spread to show."
    else:
        told = f"A bar is the median of {_between(counts)}; its line goes from the least sum of the parts in a run to the greatest"
        told += ", and where there is none the bar is one run." if min(counts) == 1 else "."
    return section | {"note": f"{section['note']} {told}", "range": True}


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most} runs" if least == most else f"{least} to {most} runs"


def _times_figure(rows: Sequence[Row], network: str | None) -> dict[str, Any]:
    section = {
        "kind": "bars",
        "id": "times-figure",
        "title": "From the kill until the survivors go on",
        "note": f"By parallelism, strategy and number of workers; {network}, the dead not replaced. The iteration that is done again is not in "
        "it. Each part is the longest at any survivor, so a bar may be longer than all of it took.",
        "where": {"part": "recovery", "status": MEASURED, "network": network, "form": "survivors only"},
        "by": ["kind", "strategy", "workers"],
        "values": _TIMES,
        "unit": "s",
    }
    return _bars(rows, section)


def _times_table(by: list[str]) -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "times",
        "title": "What each recovery took",
        "note": "Milliseconds. Detect: from the SIGKILL, before the iteration is computed, to the first survivor that knows, which first computes "
        "its part. Each other time is the longest at any survivor, waiting for others included. Share: everybody's progress. Parts: of a split model, given to those "
        "who hold them from now on. Rebuild and load: the application, and its state. Next commit: from the kill; what is more than the parts is the iteration "
        "that is done again. Redone: iterations. They count from 0.",
        "where": {"part": "recovery", "status": MEASURED},
        "by": by,
        "columns": [
            ["recover_s", "next commit", "ms"],
            ["redone_steps", "redone", "number"],
            *([key, heading, "ms"] for key, heading in _TIMES),
            ["snapshot_s", "snapshot", "ms"],
        ],
    }


def _end_table(by: list[str]) -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "end",
        "title": "What each recovery left",
        "note": "Bits: all weights, buffers and momenta as in the undisturbed run; partial promises other ones, and is judged by "
        "the accuracy. Accuracy on the test set at the end of these short runs. Files: "
        "written by the job besides its report.",
        "where": {"part": "recovery", "status": MEASURED},
        "by": by,
        "columns": [
            ["completes", "completes", "truth"],
            ["identical", "survivors alike", "truth"],
            ["same_bits", "same bits", "truth"],
            ["lost_samples", "samples lost", "number"],
            ["accuracy", "accuracy", "%"],
            ["accuracy_undisturbed", "undisturbed", "%"],
            ["files", "files", "number"],
            ["kill_rank", "killed ranks", "text"],
        ],
    }


def _restored_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "restored",
        "title": "What was restored as it was some iterations before (partial)",
        "note": "Backups in the place of mirrors: an eighth of a part is sent every other iteration, the blocks first that have changed most. The part of the "
        "dead worker is restored from there, and all else stays. Age: iterations since a block was sent, mean and most, of blocks that may not have changed since. "
        "The bits are others than the undisturbed run's; what that costs is the accuracy at the end, lost less gained.",
        "where": {"part": "recovery", "status": MEASURED, "strategy": PARTIAL},
        "by": ["network", "kind", "workers", "kill_step"],
        "columns": [
            ["restored_parts", "parts", "number"],
            ["restored_from", "from", "text"],
            ["restored_blocks", "blocks", "number"],
            ["restored_age", "age", "number"],
            ["restored_oldest", "oldest", "number"],
            ["recover_s", "next commit", "ms"],
            ["accuracy", "accuracy", "%"],
            ["accuracy_undisturbed", "undisturbed", "%"],
            ["accuracy_loss", "lost", "%"],
        ],
    }


def _calls_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "calls",
        "title": "What each recovery asked of MPI",
        "note": "Calls by one survivor in one recovery, counted as it carried out the orders of the protocol. Besides these, errors that are "
        "returned instead of ending the job, and MPI_Comm_get_failed for the report.",
        "where": {"part": "recovery", "status": MEASURED},
        "by": ["kind", "strategy"],
        "columns": [
            *([call, call, "number"] for call in CALLS),
            ["decision", "decided", "text"],
            ["kill_step", "runs", "count"],
        ],
    }


def _needs_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "needs",
        "title": "What breaks without each call",
        "note": "The protocol that the workers run, with one call left out, in every run of a job of so many workers. Moves: "
        "of the shortest run that goes wrong, the middle of the strategies. Deadlock: somebody waits for ever. Agree or revoke meets shrink: survivors are in calls that do not fit together, which MPI "
        "leaves undefined. Rubbish: terms of different sums, or a spoiled input. Where nobody need die, who has left looks dead.",
        "where": {"part": "needs", "status": MEASURED},
        "by": ["call"],
        "columns": [
            ["purpose", "what it is for", "text"],
            ["instead", "in its place", "text"],
            ["breaks_under", "goes wrong under", "text"],
            ["how", "how", "text"],
            ["moves", "moves", "number"],
            ["workers", "workers", "number"],
        ],
    }


def _structures_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "structures",
        "title": "Which data structure needs a checkpoint",
        "note": "Whether it does, and where it comes from. Found by killing a worker with no checkpoint anywhere, and, where the model is split, again with "
        "nobody keeping a copy (--mirror 0) of what the worker held.",
        "where": {"part": "structures", "status": MEASURED},
        "by": ["structure"],
        "columns": [*([kind, kind, "text"] for kind in KINDS), ["how", "checked by", "text"]],
    }


def _bare_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "bare",
        "title": "Split models of which nobody keeps a copy",
        "note": "--mirror 0: what the dead held is gone. All go back to the newest checkpoint, or begin again.",
        "where": {"part": "bare", "status": MEASURED},
        "by": ["kind", "from", "workers", "kill_step"],
        "columns": [
            ["completes", "completes", "truth"],
            ["decision", "decided", "text"],
            ["restarts", "job restarted", "number"],
            ["redone_steps", "redone", "number"],
            ["recover_s", "next commit", "ms"],
            ["same_bits", "same bits", "truth"],
        ],
    }


def _pace_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "pace",
        "title": "An iteration with nobody killed",
        "note": "Medians over iterations, then over workers, of each column by itself, so they need not add up. Communication is what is neither "
        "computing nor the optimizer: the sums and the wait for others; of a pipeline, handing over between stages is in computing.",
        "where": {"part": "undisturbed", "status": MEASURED},
        "by": ["network", "kind", "workers"],
        "columns": [
            ["step_s", "iteration", "ms"],
            ["compute_s", "computing", "ms"],
            ["communication_s", "communication", "ms"],
            ["optimizer_s", "optimizer", "ms"],
            ["parameters", "parameters", "number"],
            ["accuracy", "accuracy", "%"],
        ],
    }


def _step_figure(rows: Sequence[Row]) -> dict[str, Any]:
    section = {
        "kind": "bars",
        "id": "step-figure",
        "title": "An iteration of the paper's networks, without faults",
        "note": "Medians over the iterations of a run.",
        "where": {"part": "step", "status": MEASURED},
        "by": ["network", "workers", "mode"],
        "values": [["step_s", "iteration"]],
        "unit": "s",
    }
    return _bars(rows, section)


def _step_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "step",
        "title": "What protection costs while nothing fails",
        "note": "MPI alone: one sum of all gradients. ULFM on: the same with --with-ft ulfm. Protected: a session, whose sums keep their order.",
        "where": {"part": "step", "status": MEASURED},
        "by": ["network", "workers", "mode"],
        "columns": [
            ["step_s", "iteration", "ms"],
            ["parameters", "parameters", "number"],
            ["batch", "samples", "number"],
        ],
    }


def _data_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "data",
        "title": "The paper's data policy: survivors read the blocks of the dead again",
        "note": "Each worker holds contiguous blocks of the data set, read from a file. Read again: by all survivors together; more than the dead "
        "held, because runs of blocks stay contiguous. The time is that of the slowest survivor, from a warm page cache.",
        "where": {"part": "data", "status": MEASURED},
        "by": ["workers", "kills"],
        "columns": [
            ["reread_s", "reading again", "ms"],
            ["reread_samples", "samples read again", "number"],
            ["resident_lost", "samples that the dead held", "number"],
            ["held_once", "each block held once", "truth"],
            ["each_once", "each sample used once", "truth"],
        ],
    }


_ELASTIC_BY = ["scenario", "comes", "fabric", "strategy", "workers"]


def _elastic_figure(rows: Sequence[Row]) -> dict[str, Any]:
    section = {
        "kind": "bars",
        "id": "elastic-figure",
        "title": "A worker dies: down (it is not replaced) and same (it is)",
        "note": "From the kill to the next commit, by number of workers. Repair: until the last survivor goes on. Redone: from there to "
        "the commit, the iterations that are done again.",
        "where": {"part": "elastic", "status": MEASURED, "kills": 1},
        "by": ["scenario", "comes", "fabric", "strategy", "workers"],
        "values": [["detect_s", "detect"], ["repair_s", "repair"], ["redo_s", "redone"]],
        "unit": "s",
    }
    return _bars(rows, section)


def _elastic_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "elastic",
        "title": "Down and same: what the loss of a worker costs",
        "note": "After Li, Bosilca, Bouteiller, Nicolae, SC-W 2023, in our reading. Milliseconds. Their resilient collectives are forward over ULFM: the survivors "
        "do the failed sum again. What stands for Elastic Horovod is reinit from a checkpoint over Gloo: all go back to the last commit and build "
        "the application again; restart goes back, and builds nothing. Repair has revoke, agree, shrink, rebuild and load in it. A new process "
        "joins later, and is in the next table.",
        "where": {"part": "elastic", "status": MEASURED, "kills": 1},
        "by": _ELASTIC_BY,
        "columns": [
            ["recover_s", "next commit", "ms"],
            ["redone_steps", "redone", "number"],
            ["detect_s", "detect", "ms"],
            ["repair_s", "repair", "ms"],
            ["redo_s", "redone in", "ms"],
            *([key, heading, "ms"] for key, heading in _TIMES[1:] if key not in ("share_s", "transfer_s")),
            ["lost_samples", "samples lost", "number"],
            ["completes", "completes", "truth"],
            ["same_bits", "same bits", "truth"],
        ],
    }


def _joined_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "joined",
        "title": "Same and up: what it costs that new processes join",
        "note": "Up: nobody dies; a job of half as many workers is told to grow (holdfast scale). They join between two iterations, whatever the strategy. "
        "Held: how long the others were kept from computing, over all that joined, and in how many times. State: of that, meeting and being given the state. "
        "Joined after: from the kill, or the request, until the last takes part; a process starts, and waits for the end of an iteration, which takes two seconds "
        "more here for as long as somebody is missing.",
        "where": {"part": "elastic", "status": MEASURED, "comes": PROCESS},
        "by": _ELASTIC_BY,
        "columns": [
            ["joined", "joined", "number"],
            ["workers_at_end", "workers at the end", "number"],
            ["held_s", "held", "ms"],
            ["times_held", "times", "number"],
            ["give_s", "state", "ms"],
            ["join_s", "joined after", "ms"],
            ["lost_samples", "samples lost", "number"],
            ["same_bits", "same bits", "truth"],
        ],
    }


def _not_run_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "not-run",
        "title": "What could not be run",
        "note": "",
        "where": {"status": NOT_RUN},
        "by": ["part", "network", "kind", "scenario", "comes", "fabric", "workers"],
        "columns": [["strategy", "strategy", "text"], ["kill_step", "kill step", "text"], ["why", "why", "text"]],
    }
