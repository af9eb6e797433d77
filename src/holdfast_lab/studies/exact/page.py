"""The page of the exactness study."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.exact.claims import LARGEST_RATIO, imbalances
from holdfast_lab.studies.exact.goodput import SAMPLE_S, WORKERS
from holdfast_lab.studies.exact.spread import spreads
from holdfast_lab.studies.exact.workers.cost import (
    ALONE,
    CERTIFICATE,
    DDP,
    FOLD,
    MEMORY,
    MPI,
    ORDERED,
    PLAIN,
    TREE,
    WHOLE,
)
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
    FOLD: "deterministic, fold",
    TREE: "deterministic, tree",
    CERTIFICATE: "deterministic, fold, certificate",
    MEMORY: "unordered, shared memory",
    MPI: "unordered, MPI Allreduce",
    PLAIN: "plain loop, MPI Allreduce",
    DDP: "DDP on Gloo",
    ALONE: "no all-reduce",
    WHOLE: "no all-reduce, one slice per worker",
}
"""Displayed names of variants."""
_CURVE = (FOLD, TREE, MEMORY, MPI, PLAIN, DDP, ALONE)
_ASIDE = 0.1
"""Horizontal distance between the points of the same number of slices."""
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


# -- cost


def _shown(row: Row) -> Row:
    texts = {
        f"{name}_shown": _with_interval(row, name) for name in ("to_any", "to_plain", "to_ddp", "to_whole", "to_fold")
    }
    place = {"place": f"{row['network']}, {row['workers']} workers, {row['slices']} slices"}
    return row | texts | place | {"summed": _NAMES.get(row["variant"], row["variant"])}


def _against_any(cost: Sequence[Row]) -> Section:
    return intervals(
        "against-any-order",
        "Step time with deterministic all-reduce relative to unordered all-reduce",
        "Median of ratios within a round of blocks, 95 % intervals, relative to the faster of two unordered "
        "all-reduces in the same session. Shaded: up to 1.03. With one slice per worker, the unordered all-reduce "
        "through shared memory does the same work, so these points show the precision of the measurement.",
        [row for row in cost if row["variant"] in ORDERED],
        by=["place"],
        series=["summed"],
        x=["to_any", "deterministic step / unordered step"],
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
        "The mini-batch stays the same, so more slices are smaller slices. Relative to a step with one slice per "
        "worker and no all-reduce, timed in the same blocks. An increase that also appears without all-reduce is the "
        "cost of smaller micro-batches.",
        [
            row | {"aside": row["share"] + _ASIDE * (_CURVE.index(row["variant"]) - (len(_CURVE) - 1) / 2)}
            for row in chosen
        ],
        series=["summed"],
        x=["aside", "slices per worker"],
        y=["to_whole", "step / step with one slice per worker, no all-reduce"],
        interval=["to_whole_low", "to_whole_high"],
    )


def _steps(cost: Sequence[Row]) -> Section:
    return table(
        "steps",
        "Median step times",
        "Medians over blocks, in which all variants take turns in the same processes, and ratios with 95 % intervals.",
        cost,
        by=["network", "workers", "slices", "summed"],
        columns=[
            milliseconds("step_s", "step"),
            text("to_any_shown", "to unordered"),
            text("to_plain_shown", "to a plain loop"),
            text("to_ddp_shown", "to DDP"),
            text("to_whole_shown", "to one slice per worker, no all-reduce"),
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
        "Memory of the all-reduce, on the whole machine",
        "Allocated: pages of the shared-memory segments; for DDP its buckets and the gradients copied into them. "
        "Expected: one gradient per slice and one for the result; for DDP two per worker. A gradient has four bytes "
        "per parameter.",
        shown,
        by=["network", "parameters", "workers", "slices", "summed"],
        columns=[
            megabytes("bytes", "allocated"),
            megabytes("expected_bytes", "expected"),
            number("gradients", "in gradients"),
        ],
    )


# -- after a kill


def _after_a_kill(jobs: Sequence[Row]) -> list[Section]:
    ways = imbalances(jobs, _SEED)
    digits = {"imbalance": 3, "samples_per_s": 4, "goodput": 3}
    shown = [row | {f"{key}_shown": _with_interval(row, key, n) for key, n in digits.items()} for row in ways]
    figure = intervals(
        "after-a-kill",
        "Goodput after a kill, by division of the work among the survivors",
        "One worker of four is killed by SIGKILL. Medians over runs, 95 % intervals, from the kill to the end of the "
        "job, detection and recovery included. Expected: from the number of survivors and the imbalance of their "
        "slices alone.",
        [*map(_goodput, ways), *map(_expected, ways)],
        by=["divided"],
        series=["kind"],
        x=["goodput", "samples per second, % of those before the kill"],
        interval=["goodput_low", "goodput_high"],
    )
    numbers = table(
        "imbalance",
        "Imbalance, expected and measured",
        "Expected: ceil(slices / alive) / (slices / alive). Measured: step time after the kill relative to an even "
        f"division of the work among the survivors. Each sample takes {1000 * SAMPLE_S:g} ms of sleep, as if each "
        "worker had its own device.",
        shown,
        by=["divided"],
        columns=[
            number("alive", "workers after the kill"),
            number("expected"),
            text("imbalance_shown", "measured"),
            text("samples_per_s_shown", "samples/s"),
            text("goodput_shown", "relative to before the kill"),
            seconds("recover_s", "step with the kill"),
            number("runs"),
        ],
    )
    return [figure, numbers]


def _goodput(way: Row) -> Row:
    ends = {f"goodput{end}": way[f"goodput{end}"] for end in ("", "_low", "_high")}
    return way | {"kind": "measured"} | {name: None if end is None else 100 * end for name, end in ends.items()}


def _expected(way: Row) -> Row:
    return {"divided": way["divided"], "kind": "expected", "goodput": 100 * way["alive"] / WORKERS / way["expected"]}


# -- spread of final results


def _ends(name: str, rows: Sequence[Row]) -> Section:
    return intervals(
        f"ends-{name}",
        f"Final accuracy of runs with failures: {name}",
        "Each point is a run in which one to five of eight workers fail at random; initial weights, samples and order "
        "are the same in all runs. Points of the same accuracy overlap.",
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
        "Spread of final results",
        "Standard deviations over runs with 95 % intervals. Same: runs with the sha256 of the failure-free run.",
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
