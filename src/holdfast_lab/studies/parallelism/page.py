"""Report sections of the study of parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_lab.pages.rows import grouped
from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.parallelism.elastic import PROCESS
from holdfast_lab.studies.parallelism.jobs import KINDS, PARTIAL
from holdfast_lab.studies.parallelism.rows import CALLS
from holdfast_lab.studies.sections import (
    Section,
    bars,
    count,
    measured,
    milliseconds,
    not_run,
    number,
    percent,
    sentence,
    sentences,
    table,
    text,
    truth,
)

_BY = ["network", "kind", "strategy", "form", "workers", "kill_step"]
_IF_THEY_DIFFER = ("network", "form")
"""Columns that are omitted where all runs have the same value."""

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


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    killed = [row for row in rows if row["part"] == "recovery" and row["status"] == MEASURED]
    by = [name for name in _BY if name not in _IF_THEY_DIFFER or len({row[name] for row in killed}) > 1]
    return [
        _answers([row for row in killed if _in_figure(row, killed)], by),
        _times_figure(rows, killed[0]["network"] if killed else None),
        _times_table(by),
        _end_table(by),
        _RESTORED_TABLE,
        _CALLS_TABLE,
        _NEEDS_TABLE,
        _STRUCTURES_TABLE,
        _BARE_TABLE,
        _PACE_TABLE,
        _step_figure(rows),
        _STEP_TABLE,
        _DATA_TABLE,
        _elastic_figure(rows),
        _ELASTIC_TABLE,
        _JOINED_TABLE,
        _NOT_RUN,
    ]


def _in_figure(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a run uses the first network and does not replace failed workers."""
    return bool(row["network"] == rows[0]["network"] and row["form"] == "survivors only")


def _answers(rows: Sequence[Row], by: Sequence[str]) -> Section:
    """For each parallelism, name the strategy that finished the next iteration soonest, and the time of the others."""
    items = []
    killed = sorted((row for row in rows if row.get("recover_s")), key=lambda row: float(row["recover_s"]))
    for kind in dict.fromkeys(row["kind"] for row in rows if row.get("recover_s")):
        groups = grouped([row for row in killed if row["kind"] == kind], ["strategy"]).values()
        best, *slower = sorted((group[(len(group) - 1) // 2] for group in groups), key=lambda row: row["recover_s"])
        others = [
            f"{row['strategy']} {row['recover_s'] / best['recover_s']:.1f} times as long, {_again(row)}"
            for row in slower
        ]
        told = f"{kind}: {best['strategy']} finished the next iteration {best['recover_s']:.3f} s after the kill, {_again(best)}"
        told += f"; {'; '.join(others)}" if others else ""
        items.append(sentence(f"{told}.", "times", *(best[name] for name in by)))
    title = "What a kill costs, one line per parallelism: the median run of each strategy"
    return sentences("answers", title, items)


def _again(row: Mapping[str, Any]) -> str:
    steps = row["redone_steps"]
    words = "no iteration redone" if not steps else f"{steps} iteration{'' if steps == 1 else 's'} redone"
    if row.get("restored_parts"):
        words += f", a part {row['restored_age']:.3g} iterations old"
    return words


def _bars(rows: Sequence[Row], section: dict[str, Any]) -> Section:
    """Return a bar chart whose note says how many runs a bar covers, and what its line is."""
    chosen = [row for row in rows if all(row.get(name) == value for name, value in section["where"].items())]
    counts = [len(group) for group in grouped(chosen, section["by"]).values()]
    if max(counts, default=1) == 1:
        told = "A bar is one run, so no spread is shown."
    else:
        told = f"A bar is the median of {_between(counts)}; its line spans the smallest to the largest total of a run"
        told += "; a bar without a line is one run." if min(counts) == 1 else "."
    return section | {"note": f"{section['note']} {told}", "range": True}


def _between(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most} runs" if least == most else f"{least} to {most} runs"


def _times_figure(rows: Sequence[Row], network: str | None) -> Section:
    section = bars(
        "times-figure",
        "From the kill until the survivors resume",
        f"By parallelism, strategy and number of workers; {network}, failed workers not replaced. The redone "
        "iteration is not included. Each part is the longest at any survivor, so a bar may be longer than the whole "
        "recovery.",
        where=measured("recovery", network=network, form="survivors only"),
        by=["kind", "strategy", "workers"],
        values=_TIMES,
        unit="s",
    )
    return _bars(rows, section)


def _times_table(by: list[str]) -> Section:
    return table(
        "times",
        "Duration of each recovery",
        "Milliseconds. Detect: from the SIGKILL, before the iteration is computed, to the first survivor that "
        "detects it; survivors compute their part first. Each other time is the longest at any survivor, waiting "
        "included. Share: exchange of progress. Parts: transfer of a split model's parts to their new owners. "
        "Rebuild and load: the application and its state. Next commit: counted from the kill; the time beyond the "
        "parts is the redone iteration. Redone: iterations. They count from 0.",
        where=measured("recovery"),
        by=by,
        columns=[
            milliseconds("recover_s", "next commit"),
            number("redone_steps", "redone"),
            *(milliseconds(key, heading) for key, heading in _TIMES),
            milliseconds("snapshot_s", "snapshot"),
        ],
    )


def _end_table(by: list[str]) -> Section:
    return table(
        "end",
        "Result of each recovery",
        "Bits: all weights, buffers and momenta equal the undisturbed run's; partial does not promise that, and is "
        "judged by the accuracy. Accuracy is on the test set at the end of these short runs. Files: written by the "
        "job besides its report.",
        where=measured("recovery"),
        by=by,
        columns=[
            truth("completes"),
            truth("identical", "survivors equal"),
            truth("same_bits"),
            number("lost_samples", "samples lost"),
            percent("accuracy"),
            percent("accuracy_undisturbed", "undisturbed"),
            number("files"),
            text("kill_rank", "killed ranks"),
        ],
    )


_RESTORED_TABLE = table(
    "restored",
    "Parts restored from earlier iterations (partial)",
    "Delta standbys in place of hot standbys: an eighth of a part is sent every other iteration, the most changed "
    "blocks first. The part of the dead worker is restored from there; the rest stays current. Age: iterations since "
    "a block was sent, mean and maximum; a block may not have changed since. The bits differ from the undisturbed "
    "run; the cost is the loss of accuracy at the end.",
    where=measured("recovery", strategy=PARTIAL),
    by=["network", "kind", "workers", "kill_step"],
    columns=[
        number("restored_parts", "parts"),
        text("restored_from", "from"),
        number("restored_blocks", "blocks"),
        number("restored_age", "age"),
        number("restored_oldest", "oldest"),
        milliseconds("recover_s", "next commit"),
        percent("accuracy"),
        percent("accuracy_undisturbed", "undisturbed"),
        percent("accuracy_loss", "lost"),
    ],
)


_CALLS_TABLE = table(
    "calls",
    "MPI calls of each recovery",
    "Calls by one survivor in one recovery, counted as it executed the protocol's orders. Recovery also needs errors "
    "that are returned instead of ending the job, and MPI_Comm_get_failed for the report.",
    where=measured("recovery"),
    by=["kind", "strategy"],
    columns=[*(number(call, call) for call in CALLS), text("decision", "decided"), count("kill_step", "runs")],
)


_NEEDS_TABLE = table(
    "needs",
    "What breaks without each call",
    "The workers' protocol with one call left out, in every run of a job with this many workers. Moves: of the "
    "shortest run that goes wrong, median over strategies. Deadlock: a rank waits forever. Agree or revoke meets "
    "shrink: survivors are in calls that do not match, which MPI leaves undefined. Rubbish: an all-reduce of "
    "mismatched terms, or a spoiled input. Where no rank need fail, a rank that has left looks failed.",
    where=measured("needs"),
    by=["call"],
    columns=[
        text("purpose", "what it is for"),
        text("instead", "in its place"),
        text("breaks_under", "goes wrong under"),
        text("how"),
        number("moves"),
        number("workers"),
    ],
)


_STRUCTURES_TABLE = table(
    "structures",
    "Which data structure needs a checkpoint",
    "Whether a checkpoint is needed, and where the data comes from otherwise. Found by killing a worker without "
    "checkpoints and, for split models, again without standbys (--mirror 0).",
    where=measured("structures"),
    by=["structure"],
    columns=[*(text(kind) for kind in KINDS), text("how", "checked by")],
)


_BARE_TABLE = table(
    "bare",
    "Split models without standbys",
    "--mirror 0: what the dead worker held is lost. All workers go back to the newest checkpoint, or to the beginning.",
    where=measured("bare"),
    by=["kind", "from", "workers", "kill_step"],
    columns=[
        truth("completes"),
        text("decision", "decided"),
        number("restarts", "job restarted"),
        number("redone_steps", "redone"),
        milliseconds("recover_s", "next commit"),
        truth("same_bits"),
    ],
)


_PACE_TABLE = table(
    "pace",
    "An iteration without a kill",
    "Medians over iterations, then over workers, each column separately, so they need not add up. Communication is "
    "the time beyond computing and the optimizer: all-reduce and waiting. In a pipeline, transfers between stages "
    "count as computing.",
    where=measured("undisturbed"),
    by=["network", "kind", "workers"],
    columns=[
        milliseconds("step_s", "iteration"),
        milliseconds("compute_s", "computing"),
        milliseconds("communication_s", "communication"),
        milliseconds("optimizer_s", "optimizer"),
        number("parameters"),
        percent("accuracy"),
    ],
)


def _step_figure(rows: Sequence[Row]) -> Section:
    section = bars(
        "step-figure",
        "An iteration of the paper's networks, without faults",
        "Medians over the iterations of a run.",
        where=measured("step"),
        by=["network", "workers", "mode"],
        values=[["step_s", "iteration"]],
        unit="s",
    )
    return _bars(rows, section)


_STEP_TABLE = table(
    "step",
    "Cost of protection without failures",
    "MPI alone: one all-reduce of all gradients. ULFM on: the same with --with-ft ulfm. Protected: a session, whose "
    "reductions have a fixed order.",
    where=measured("step"),
    by=["network", "workers", "mode"],
    columns=[milliseconds("step_s", "iteration"), number("parameters"), number("batch", "samples")],
)


_DATA_TABLE = table(
    "data",
    "The paper's data policy: survivors reread the blocks of a dead worker",
    "Each worker holds contiguous blocks of the dataset, read from a file. Reread: by all survivors together, and "
    "more than the dead worker held, because runs of blocks stay contiguous. The time is that of the slowest "
    "survivor, from a warm page cache.",
    where=measured("data"),
    by=["workers", "kills"],
    columns=[
        milliseconds("reread_s", "rereading"),
        number("reread_samples", "samples reread"),
        number("resident_lost", "samples of the dead worker"),
        truth("held_once", "each block held once"),
        truth("each_once", "each sample used once"),
    ],
)


_ELASTIC_BY = ["scenario", "comes", "fabric", "strategy", "workers"]


def _elastic_figure(rows: Sequence[Row]) -> Section:
    section = bars(
        "elastic-figure",
        "A worker fails: down (not replaced) and same (replaced)",
        "From the kill to the next commit, by number of workers. Repair: until the last survivor resumes. Redone: "
        "from there to the commit, which covers the redone iterations.",
        where=measured("elastic", kills=1),
        by=["scenario", "comes", "fabric", "strategy", "workers"],
        values=[["detect_s", "detect"], ["repair_s", "repair"], ["redo_s", "redone"]],
        unit="s",
    )
    return _bars(rows, section)


_ELASTIC_TABLE = table(
    "elastic",
    "Down and same: the cost of losing a worker",
    "After Li, Bosilca, Bouteiller, Nicolae, SC-W 2023, in our reading. Milliseconds. Their resilient collectives "
    "correspond to forward over ULFM: the survivors retry the failed all-reduce. Elastic Horovod corresponds to "
    "reinit from a checkpoint over Gloo: all workers go back to the last commit and rebuild the application. Restart "
    "goes back without rebuilding. Repair includes revoke, agree, shrink, rebuild and load. A new process joins "
    "later and is in the next table.",
    where=measured("elastic", kills=1),
    by=_ELASTIC_BY,
    columns=[
        milliseconds("recover_s", "next commit"),
        number("redone_steps", "redone"),
        milliseconds("detect_s", "detect"),
        milliseconds("repair_s", "repair"),
        milliseconds("redo_s", "redone in"),
        *(milliseconds(key, heading) for key, heading in _TIMES[1:] if key not in ("share_s", "transfer_s")),
        number("lost_samples", "samples lost"),
        truth("completes"),
        truth("same_bits"),
    ],
)


_JOINED_TABLE = table(
    "joined",
    "Same and up: the cost of joining processes",
    "Up: no worker fails; a job with half the workers is scaled up (holdfast scale). New processes join between two "
    "iterations under any strategy. Held: how long the others were kept from computing, over all joins, and how "
    "often. State: the rendezvous and state transfer within that time. Joined after: from the kill, or the request, "
    "until the last process participates. A process starts, then waits for the end of an iteration; iterations take "
    "two seconds longer here while a worker is missing.",
    where=measured("elastic", comes=PROCESS),
    by=_ELASTIC_BY,
    columns=[
        number("joined"),
        number("workers_at_end", "workers at the end"),
        milliseconds("held_s", "held"),
        number("times_held", "times"),
        milliseconds("give_s", "state"),
        milliseconds("join_s", "joined after"),
        number("lost_samples", "samples lost"),
        truth("same_bits"),
    ],
)


_NOT_RUN = not_run(
    ["part", "network", "kind", "scenario", "comes", "fabric", "workers"],
    title="What could not be run",
    columns=[text("strategy"), text("kill_step"), text("why")],
)
