"""How the study of exactness shows its rows."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.exact.claims import LARGEST_RATIO, imbalances
from holdfast_lab.studies.exact.goodput import SAMPLE_S, WORKERS
from holdfast_lab.studies.exact.spread import NOTHING, spreads
from holdfast_lab.studies.exact.workers.cost import ALONE, CERTIFICATE, DDP, FOLD, MEMORY, MPI, ORDERED, PLAIN, TREE
from holdfast_lab.studies.sections import (
    Section,
    intervals,
    megabytes,
    milliseconds,
    not_run,
    number,
    points,
    seconds,
    table,
    text,
)

_NAMES = {
    FOLD: "in order, fold",
    TREE: "in order, tree",
    CERTIFICATE: "in order, fold, certificate",
    MEMORY: "any order, shared memory",
    MPI: "any order, MPI Allreduce",
    PLAIN: "plain loop, MPI Allreduce",
    DDP: "DDP on Gloo",
}
"""What variants are called; the others keep their names."""
_CURVE = (FOLD, TREE, MEMORY, MPI, PLAIN, DDP, ALONE)
_ASIDE = 0.1
"""How far apart in x the points of one number of slices are drawn."""
_SEED = 0
_NBSP = "\N{NO-BREAK SPACE}"


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    measured = [row for row in rows if row["status"] == MEASURED]
    cost = [_shown(row) for row in measured if row["part"] == "cost"]
    jobs = [row for row in measured if row["part"] == "goodput"]
    places = list(dict.fromkeys((row["network"], row["workers"]) for row in cost))
    trainings = list(dict.fromkeys(row["training"] for row in measured if row["part"] == "spread"))
    return [
        _against_any(cost),
        *[_curve(network, workers, cost) for network, workers in places],
        _steps(cost),
        _memory([row for row in measured if row["part"] == "memory"]),
        *_after_a_kill(jobs),
        *[_ends(name, [row for row in measured if row.get("training") == name]) for name in trainings],
        _spreads(spreads(measured, _SEED)),
        not_run(["part", "network", "workers", "slices", "divided", "repetition"], rows),
    ]


def _with_interval(row: Row, name: str, digits: int = 3) -> str:
    ends = (row.get(f"{name}_low"), row.get(f"{name}_high"))
    told = "" if None in ends else f" [{ends[0]:.{digits}g}, {ends[1]:.{digits}g}]"
    return f"{row[name]:.{digits}g}{told}".replace(" ", _NBSP)


# ---------------------------------------------------------------------------------------------
# Cost


def _shown(row: Row) -> Row:
    texts = {
        f"{name}_shown": _with_interval(row, name) for name in ("to_any", "to_plain", "to_ddp", "to_whole", "to_fold")
    }
    place = {"place": f"{row['network']}, {row['workers']} workers, {row['slices']} slices"}
    return row | texts | place | {"summed": _NAMES.get(row["variant"], row["variant"])}


def _against_any(cost: Sequence[Row]) -> Section:
    return intervals(
        "against-any-order",
        "A step with sums in order against the same slices summed in any order",
        "Median of ratios within a round of blocks, 95 % intervals; against the quicker of two ways in which the same session sums in any order. Shaded: up to 1.03. "
        "With one slice a worker, what is summed in any order through shared memory is the same work: there the points show how exactly this is measured.",
        [row for row in cost if row["variant"] in ORDERED],
        by=["place"],
        series=["summed"],
        x=["to_any", "step in order / step in any order"],
        interval=["to_any_low", "to_any_high"],
        band=[1.0, LARGEST_RATIO],
    )


def _curve(network: str, workers: int, cost: Sequence[Row]) -> Section:
    chosen = [
        row for row in cost if (row["network"], row["workers"]) == (network, workers) and row["variant"] in _CURVE
    ]
    return points(
        f"curve-{network}-{workers}",
        f"More slices than workers: {network}, {workers} workers",
        "The mini-batch stays the same, so more slices are smaller ones. Over a step with one slice a worker that sums nothing, timed in the same blocks; "
        "what grows without a sum, too, is what smaller micro-batches cost by themselves.",
        [
            row | {"aside": row["share"] + _ASIDE * (_CURVE.index(row["variant"]) - (len(_CURVE) - 1) / 2)}
            for row in chosen
        ],
        series=["summed"],
        x=["aside", "slices a worker"],
        y=["to_whole", "step / step of one slice a worker, no sum"],
        interval=["to_whole_low", "to_whole_high"],
    )


def _steps(cost: Sequence[Row]) -> Section:
    return table(
        "steps",
        "What a step takes",
        "Medians over blocks, in which all take turns in the same processes, and ratios with their 95 % intervals.",
        cost,
        by=["network", "workers", "slices", "summed"],
        columns=[
            milliseconds("step_s", "step"),
            text("to_any_shown", "to any order"),
            text("to_plain_shown", "to a plain loop"),
            text("to_ddp_shown", "to DDP"),
            text("to_whole_shown", "to one slice a worker, no sum"),
            number("rounds", "blocks"),
        ],
        folded=True,
    )


def _memory(rows: Sequence[Row]) -> Section:
    shown = [
        row | {"summed": _NAMES[row["variant"]], "gradients": row["bytes"] / row["gradient_bytes"]} for row in rows
    ]
    return table(
        "memory",
        "What sums take in memory, on the whole machine",
        "Allocated: pages of the shared segments; of DDP its buckets and the gradients that go into them. Expected: a gradient for each slice and one for the "
        "result; of DDP two a worker. A gradient is four bytes a parameter.",
        shown,
        by=["network", "parameters", "workers", "slices", "summed"],
        columns=[
            megabytes("bytes", "allocated"),
            megabytes("expected_bytes", "expected"),
            number("gradients", "in gradients"),
        ],
    )


# ---------------------------------------------------------------------------------------------
# After a kill


def _after_a_kill(jobs: Sequence[Row]) -> list[Section]:
    ways = imbalances(jobs, _SEED)
    digits = {"imbalance": 3, "samples_per_s": 4, "goodput": 3}
    shown = [row | {f"{key}_shown": _with_interval(row, key, n) for key, n in digits.items()} for row in ways]
    figure = intervals(
        "after-a-kill",
        "After a kill: how the work is divided among those who are left",
        "One worker of four is killed by SIGKILL. Medians over runs, 95 % intervals; from the kill to the end of the job, detection and recovery included. "
        "Expected: by the number of workers alive and the imbalance of their slices alone.",
        [*map(_goodput, ways), *map(_expected, ways)],
        by=["divided"],
        series=["kind"],
        x=["goodput", "samples in a second, % of those before the kill"],
        interval=["goodput_low", "goodput_high"],
    )
    numbers = table(
        "imbalance",
        "Imbalance, expected and found",
        "Expected: ceil(slices / alive) / (slices / alive). Found: by how much a step is longer after the kill than if the work before it were divided evenly among those alive. "
        f"A sample takes its worker {1000 * SAMPLE_S:g} ms, which is waited for: each worker has, as it were, a device of its own.",
        shown,
        by=["divided"],
        columns=[
            number("alive", "workers then"),
            number("expected"),
            text("imbalance_shown", "found"),
            text("samples_per_s_shown", "samples/s"),
            text("goodput_shown", "over before"),
            seconds("recover_s", "step of the kill"),
            number("runs"),
        ],
    )
    return [figure, numbers]


def _goodput(way: Row) -> Row:
    ends = {f"goodput{end}": way[f"goodput{end}"] for end in ("", "_low", "_high")}
    return way | {"kind": "measured"} | {name: None if end is None else 100 * end for name, end in ends.items()}


def _expected(way: Row) -> Row:
    return {"divided": way["divided"], "kind": "expected", "goodput": 100 * way["alive"] / WORKERS / way["expected"]}


# ---------------------------------------------------------------------------------------------
# What it buys


def _ends(name: str, rows: Sequence[Row]) -> Section:
    return intervals(
        f"ends-{name}",
        f"Where disturbed runs end: {name}",
        "Each point is a run with one to five deaths of eight workers, drawn; all have the same weights, samples and order. Runs with the same accuracy lie on each other.",
        [row | {"kind": "a run"} for row in rows],
        by=["policy"],
        series=["kind"],
        x=["accuracy", "accuracy on the test set, %"],
    )


def _spreads(rows: Sequence[Row]) -> Section:
    shown = []
    for row in rows:
        ranges = {"accuracy_range": f"{row['accuracy_least']:.4g} to {row['accuracy_most']:.4g}"}
        texts = {f"{key}_sd_shown": _with_interval(row, f"{key}_sd") for key in ("accuracy", "loss")}
        same = {"same_shown": f"{row['same']} of {row['runs']}"}
        unbroken = {name: text.replace(" ", _NBSP) for name, text in (ranges | same).items()}
        shown.append(row | texts | unbroken)
    return table(
        "spread",
        "How far runs end apart",
        f"Standard deviations over runs with their 95 % intervals. Same: with the sha256 of the run in which {NOTHING}.",
        shown,
        by=["training", "policy"],
        columns=[
            number("hashes", "different sha256"),
            text("same_shown", "same"),
            text("accuracy_sd_shown", "accuracy, s. d., points"),
            text("accuracy_range", "accuracy, %"),
            text("loss_sd_shown", "test loss, s. d."),
        ],
    )
