"""Report sections of the study of checkpoint cost, and its advice to users and to framework developers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, Row
from holdfast_lab.studies.sections import (
    Section,
    Sentence,
    bars,
    count,
    lines,
    measured,
    megabytes,
    not_run,
    number,
    percent,
    seconds,
    sentence,
    sentences,
    table,
    text,
    truth,
)
from holdfast_lab.studies.stats import median

_PARTS = ("gather", "serialise", "compress", "write", "undivided", "sync")
_COST_BY = ["model", "optimizer", "framework", "way"]
_LARGE = 1.1
"""A way to save whose file is this many times as large as necessary is mentioned in the advice."""


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    return [
        _cost_figure(rows),
        _COST_TABLE,
        _SHARE_FIGURE,
        _SHARE_TABLE,
        _DETERMINISM_TABLE,
        _MECHANISMS_TABLE,
        _ELSEWHERE_TABLE,
        sentences("users", "Advice to users", _for_users(rows)),
        sentences("developers", "Advice to framework developers", _for_developers(rows)),
        _NOT_RUN,
    ]


def _cost_figure(rows: Sequence[Row]) -> Section:
    timed = [row for row in rows if row["part"] == "cost" and row["status"] == MEASURED]
    states = list(dict.fromkeys((row["model"], row["optimizer"]) for row in timed if row["optimizer"] == "momentum"))
    model, optimizer = states[0] if states else ("", "")
    return bars(
        "save",
        f"A save, part by part: {model} with {optimizer}",
        "Medians. Where a framework writes from compiled code, serialising, compressing and writing cannot be "
        "separated.",
        where=measured("cost", model=model, optimizer=optimizer),
        by=["framework", "way"],
        values=[[f"{part}_s", part] for part in _PARTS],
        unit="s",
    )


_COST_TABLE = table(
    "cost",
    "Cost of each way to save",
    "Medians over repetitions, one process, one thread per framework, a local disk. A save ends when all bytes are on "
    "the disk (fsync), with or without the framework's own fsync; the loop is held until the call returns. Cold: "
    "after the files were dropped from the page cache.",
    where=measured("cost"),
    by=_COST_BY,
    columns=[
        megabytes("bytes", "size"),
        seconds("save_s", "save"),
        seconds("blocked_s", "loop held"),
        *(seconds(f"{part}_s", part) for part in _PARTS),
        seconds("load_s", "load"),
        seconds("load_cold_s", "load, cold"),
        count("repetition", "runs"),
    ],
    folded=True,
)


_SHARE_FIGURE = lines(
    "share-figure",
    "Share of training time spent saving, one save per 100 steps",
    "Filled: measured, on the cores of this machine, so more workers than cores do not shorten the step. Hollow: "
    "extrapolated from one worker: the step is divided by the number of workers, and all workers share one disk.",
    where={"part": "workers"},
    series=["framework", "scheme"],
    x=["workers", "workers"],
    y=["share_100", "%"],
)


_SHARE_TABLE = table(
    "workers",
    "Frequency, number of workers, and saving scheme",
    "Root: worker 0 saves, the others wait. Rank: every worker saves its own copy as name.rank.iteration, like "
    "ChainerMN. Shared: each worker writes a part of one checkpoint, with PyTorch's DCP or with Holdfast. The global "
    "mini-batch stays the same.",
    where={"part": "workers"},
    by=["framework", "model", "scheme", "workers", "status"],
    columns=[
        seconds("step_s", "step"),
        seconds("save_s", "save"),
        seconds("wait_s", "waiting, mean"),
        megabytes("bytes", "written"),
        number("files"),
        percent("share_1", "every step"),
        percent("share_10", "every 10"),
        percent("share_100", "every 100"),
        percent("share_1000", "every 1000"),
    ],
)


_DETERMINISM_TABLE = table(
    "determinism",
    "Is the resumed run identical to an uninterrupted run?",
    "A small network with batch norm, dropout, momentum, a schedule, shuffled digits and noise, saved half-way and "
    "resumed in a new process. Distance: of the final weights from those of the undisturbed run, relative.",
    where=measured("determinism"),
    by=["framework", "run", "left_out"],
    columns=[truth("same_bits"), number("distance")],
)


_MECHANISMS_TABLE = table(
    "mechanisms",
    "Mechanisms as observed",
    "Killed: the process died at 25, 50 and 75 % of a save over an older checkpoint; what could be loaded "
    "afterwards. Damage: seven bits of the largest file were flipped. Rotation: how many of seven steps remained "
    "when asked to keep two; blank if the way has no rotation. Loop held: as a share of the save. The contents of a "
    "single call, and its omissions, are in the table above; the saving worker is in the table of workers.",
    where=measured("mechanisms"),
    by=["framework", "way"],
    columns=[
        text("killed", "after a kill"),
        text("damage", "flipped bits"),
        percent("held", "loop held"),
        number("kept", "kept of 7"),
    ],
)


_ELSEWHERE_TABLE = table(
    "elsewhere",
    "Loading with another number of workers",
    "Saved by two workers; how many of one, or of three, then found their state, another state, or an error.",
    where=measured("elsewhere"),
    by=["framework", "scheme", "saved_by", "workers"],
    columns=[text("found", "what they found")],
)


_NOT_RUN = not_run(["part", "framework", "model", "optimizer", "way", "workers"], title="What could not be measured")


_OF_WAY, _OF_RUN = ("framework", "way"), ("framework", "run", "left_out")


def _each(
    rows: Sequence[Row], part: str, names: Sequence[str], is_so: Callable[[Row], object], words: str
) -> list[Sentence]:
    """Return the words about each measured row of a part for which ``is_so``; ``names`` identify its line."""
    chosen = [row for row in rows if row["part"] == part and row["status"] == MEASURED and is_so(row)]
    return [sentence(words.format(**row), part, *(row[name] for name in names)) for row in chosen]


def _is_harmed(row: Row) -> bool:
    return "nothing" in row["killed"] or "other" in row["killed"]


def _for_users(rows: Sequence[Row]) -> list[Sentence]:
    unharmed = (
        "{framework} {way}: never save over the only checkpoint. After saves killed half-way over an older one, this "
        "could be loaded: {killed}."
    )
    kept = _each(rows, "mechanisms", _OF_WAY, _is_harmed, unharmed)
    return [*_fastest(rows), *_must_restore(rows), *_share_advice(rows), *kept]


def _for_developers(rows: Sequence[Row]) -> list[Sentence]:
    diverges = "{framework}: a single save call leaves out {left_out}; the resumed run differs ({distance:.2%} of the weights)."
    unnoticed = "{framework} {way}: flipped bits are loaded as weights; a digest would detect them."
    not_atomic = (
        "{framework} {way}: a save killed half-way over an older checkpoint leaves neither; remove the old one only when "
        "the new one is complete."
    )
    elsewhere = "{framework}, saved by {scheme}: a checkpoint of {saved_by} workers cannot be loaded by all of {workers}: {found}."
    of_workers = ("framework", "scheme", "saved_by", "workers")
    is_default = ("what one call saves", False)
    return [
        *_too_many_bytes(rows),
        *_each(rows, "determinism", _OF_RUN, lambda row: (row["run"], row["same_bits"]) == is_default, diverges),
        *_each(rows, "mechanisms", _OF_WAY, lambda row: "wrong values" in row["damage"], unnoticed),
        *_each(rows, "mechanisms", _OF_WAY, _is_harmed, not_atomic),
        *_each(rows, "elsewhere", of_workers, lambda row: not row["loads"], elsewhere),
        *_each(rows, "mechanisms", _OF_WAY, lambda row: row["kept"] not in (None, 2),
               "{framework} {way}: asked to keep 2 of 7 steps, it kept {kept}."),
    ]  # fmt: skip


def _cost_groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["part"] == "cost" and row["status"] == MEASURED:
            groups.setdefault(tuple(row[name] for name in _COST_BY), []).append(row)
    return groups


def _fastest(rows: Sequence[Row]) -> list[Sentence]:
    """Name the way of each framework that holds the loop for the shortest time, for the largest state measured."""
    groups = _cost_groups(rows)
    items = []
    for framework in dict.fromkeys(key[2] for key in groups):
        ours = {key: group for key, group in groups.items() if key[2] == framework and group[0]["whole"]}
        if not ours:
            continue
        largest = max(ours, key=lambda key: ours[key][0]["bytes"])[:2]
        same = {key: median([row["blocked_s"] for row in group]) for key, group in ours.items() if key[:2] == largest}
        best = min(same, key=lambda key: same[key])
        size = groups[best][0]["bytes"] / 1e6
        text = f"{framework}: of its {len(same)} ways, {best[3]!r} holds the loop for the shortest time: {same[best]:.2f} s for {size:.0f} MB."
        items.append(sentence(text, "cost", *best))
    return items


def _must_restore(rows: Sequence[Row]) -> list[Sentence]:
    items = []
    runs = [row for row in rows if row["part"] == "determinism" and row["status"] == MEASURED]
    for framework in dict.fromkeys(row["framework"] for row in runs):
        diverged = [
            row
            for row in runs
            if row["framework"] == framework and row["run"].startswith("without") and not row["same_bits"]
        ]
        if diverged:
            worst = max(diverged, key=lambda row: row["distance"])
            text = (
                f"{framework}: save and restore every piece: leaving out any of {len(diverged)} pieces changed the "
                f"run, most of all the {worst['left_out']} ({worst['distance']:.2%} of the weights)."
            )
            items.append(sentence(text, "determinism", framework, worst["run"], worst["left_out"]))
    return items


def _share_advice(rows: Sequence[Row]) -> list[Sentence]:
    """Name the shortest interval between saves that keeps the cost at the root below 1 %."""
    items = []
    for row in rows:
        if (
            row["part"] == "workers"
            and row["status"] == MEASURED
            and row["scheme"] == "root"
            and row["workers"] == 2
            and row["repetition"] == 0
        ):
            steps = 99 * row["save_s"] / row["step_s"]
            text = f"{row['framework']}, 2 workers, {row['model']}: below 1 % of the time with one save at the root every {steps:.0f} steps or more."
            items.append(sentence(text, "workers", row["framework"], row["model"], "root", 2, MEASURED))
    return items


def _too_many_bytes(rows: Sequence[Row]) -> list[Sentence]:
    """Name the ways whose files are larger than another way's for the same values."""
    items, groups = [], _cost_groups(rows)
    for key, group in groups.items():
        same = [
            other[0]["bytes"]
            for name, other in groups.items()
            if name[:3] == key[:3] and other[0]["whole"] and not other[0]["packed"]
        ]
        if same and group[0]["bytes"] > _LARGE * min(same):
            text = f"{key[2]} {key[3]}, {key[0]}: {group[0]['bytes'] / min(same):.2f} times the bytes of the framework's smallest uncompressed way."
            items.append(sentence(text, "cost", *key))
    return items
