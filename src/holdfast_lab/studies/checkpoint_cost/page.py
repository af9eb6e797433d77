"""How the study's rows are shown, and what follows from them for users and for those who write frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row
from holdfast_lab.studies.stats import median

_PARTS = ("gather", "serialise", "compress", "write", "undivided", "sync")
_COST_BY = ["model", "optimizer", "framework", "way"]
_SLOW = 3.0
"""A way that takes so many times as long as the fastest is worth a word of advice."""
_LARGE = 1.1
"""A way whose file is so many times as large as need be is worth one, too."""


def sections(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the sections of the page."""
    return [
        _cost_figure(rows),
        _cost_table(),
        _share_figure(),
        _share_table(),
        _determinism_table(),
        _mechanisms_table(),
        _elsewhere_table(),
        {"kind": "list", "id": "users", "title": "What users should take from it", "items": _for_users(rows)},
        {"kind": "list", "id": "developers", "title": "What framework developers should take from it", "items": _for_developers(rows)},
        _not_run_table(),
    ]  # fmt: skip


def _cost_figure(rows: Sequence[Row]) -> dict[str, Any]:
    measured = [row for row in rows if row["part"] == "cost" and row["status"] == MEASURED]
    states = list(dict.fromkeys((row["model"], row["optimizer"]) for row in measured if row["optimizer"] == "momentum"))
    model, optimizer = states[0] if states else ("", "")
    return {
        "kind": "bars",
        "id": "save",
        "title": f"A save, part by part: {model} with {optimizer}",
        "note": "Medians. Where a framework writes from compiled code, serialising, compressing and writing cannot be told apart.",
        "where": {"part": "cost", "status": MEASURED, "model": model, "optimizer": optimizer},
        "by": ["framework", "way"],
        "values": [[f"{part}_s", part] for part in _PARTS],
        "unit": "s",
    }


def _cost_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "cost",
        "title": "What each way costs",
        "note": "Medians over repetitions, one process, one thread a framework, a local disk. A save ends when all bytes are on "
        "the disk (fsync), whoever asks for it; the loop is held until the call returns. Cold: after the files were dropped from the page cache.",
        "where": {"part": "cost", "status": MEASURED},
        "by": _COST_BY,
        "columns": [
            ["bytes", "size", "MB"],
            ["save_s", "save", "s"],
            ["blocked_s", "loop held", "s"],
            *([f"{part}_s", part, "s"] for part in _PARTS),
            ["load_s", "load", "s"],
            ["load_cold_s", "load, cold", "s"],
            ["repetition", "runs", "count"],
        ],
        "folded": True,
    }


def _share_figure() -> dict[str, Any]:
    return {
        "kind": "lines",
        "id": "share-figure",
        "title": "The share of training time that saving takes, one save in 100 steps",
        "note": "Filled: measured, on the cores of this machine, so more workers than cores do not make a shorter step. Hollow: "
        "extrapolated from one worker, whose step is divided by the workers and whose disk is shared by all.",
        "where": {"part": "workers"},
        "series": ["framework", "scheme"],
        "x": ["workers", "workers"],
        "y": ["share_100", "%"],
    }


def _share_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "workers",
        "title": "Frequency, number of workers, and who saves",
        "note": "Root: worker 0 saves, the others wait. Rank: every worker saves its own copy under name.rank.iteration, as "
        "ChainerMN does. Shared: each worker writes a part of one checkpoint, with PyTorch's DCP or with Holdfast. The mini-batch of all workers together stays the same.",
        "where": {"part": "workers"},
        "by": ["framework", "model", "scheme", "workers", "status"],
        "columns": [
            ["step_s", "step", "s"],
            ["save_s", "save", "s"],
            ["wait_s", "waiting, mean", "s"],
            ["bytes", "written", "MB"],
            ["files", "files", "number"],
            ["share_1", "every step", "%"],
            ["share_10", "every 10", "%"],
            ["share_100", "every 100", "%"],
            ["share_1000", "every 1000", "%"],
        ],
    }


def _determinism_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "determinism",
        "title": "Is the resumed run the run that never stopped?",
        "note": "A small network with batch norm, dropout, momentum, a schedule, shuffled digits and noise; saved half-way and resumed "
        "in a new process. Distance: of the final weights from those of the undisturbed run, relative.",
        "where": {"part": "determinism", "status": MEASURED},
        "by": ["framework", "run", "left_out"],
        "columns": [["same_bits", "same bits", "truth"], ["distance", "distance", "number"]],
    }


def _mechanisms_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "mechanisms",
        "title": "Mechanisms, as they behaved",
        "note": "Killed: the process died at 25, 50 and 75 % of a save over an older checkpoint; what could be loaded then. "
        "Damage: seven bits of the largest file were flipped. Rotation: told to keep two of seven steps, so many were left; blank where "
        "the way has none. Loop held: for what share of a save. What one call saves, and what it leaves out, is in the table above; who saves "
        "is in that of the workers.",
        "where": {"part": "mechanisms", "status": MEASURED},
        "by": ["framework", "way"],
        "columns": [
            ["killed", "after a kill", "text"],
            ["damage", "flipped bits", "text"],
            ["held", "loop held", "%"],
            ["kept", "kept of 7", "number"],
        ],
    }


def _elsewhere_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "elsewhere",
        "title": "Loaded by another number of workers",
        "note": "Saved by two workers; so many of one, or of three, then found their state, another one, or an error.",
        "where": {"part": "elsewhere", "status": MEASURED},
        "by": ["framework", "scheme", "saved_by", "workers"],
        "columns": [["found", "found by them", "text"]],
    }


def _not_run_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "not-run",
        "title": "What could not be measured",
        "note": "",
        "where": {"status": NOT_RUN},
        "by": ["part", "framework", "model", "optimizer", "way", "workers"],
        "columns": [["why", "why", "text"]],
    }


def _item(text: str, section: str, *values: Any) -> dict[str, Any]:
    return {"text": text, "section": section, "row": [str(value) for value in values]}


def _for_users(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [*_fastest(rows), *_must_restore(rows), *_share_advice(rows), *_unharmed(rows)]


def _for_developers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        *_slow_defaults(rows),
        *_too_many_bytes(rows),
        *_defaults_that_diverge(rows),
        *_unnoticed(rows),
        *_not_atomic(rows),
        *_elsewhere(rows),
        *_rotation(rows),
    ]


def _cost_groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["part"] == "cost" and row["status"] == MEASURED:
            groups.setdefault(tuple(row[name] for name in _COST_BY), []).append(row)
    return groups


def _fastest(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Say which way of each framework holds the loop for the shortest time, for the largest state measured."""
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
        items.append(_item(text, "cost", *best))
    return items


def _must_restore(rows: Sequence[Row]) -> list[dict[str, Any]]:
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
                f"{framework}: save and restore all of it: leaving out any of {len(diverged)} pieces changed the run, the most the "
                f"{worst['left_out']} ({worst['distance']:.2%} of the weights)."
            )
            items.append(_item(text, "determinism", framework, worst["run"], worst["left_out"]))
    return items


def _share_advice(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Name the fewest steps between two saves that keep the cost at the root below 1 %."""
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
            text = f"{row['framework']}, 2 workers, {row['model']}: below 1 % of the time with one save at the root in {steps:.0f} steps or more."
            items.append(_item(text, "workers", row["framework"], row["model"], "root", 2, MEASURED))
    return items


def _mechanisms(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["part"] == "mechanisms" and row["status"] == MEASURED]


def _unharmed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']} {row['way']}: never save over the only checkpoint: after saves killed half-way over "
              f"an older one, this could be loaded: {row['killed']}.", "mechanisms", row["framework"], row["way"])
        for row in _mechanisms(rows) if "nothing" in row["killed"] or "other" in row["killed"]
    ]  # fmt: skip


def _slow_defaults(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Say what compression by default costs."""
    items, groups = [], _cost_groups(rows)
    for plain, packed in (("npz", "npz compressed"), ("hdf5", "hdf5 gzip")):
        for key, group in groups.items():
            other = groups.get((*key[:3], plain))
            if key[3] == packed and other and key[1] == "momentum":
                slower = median([r["save_s"] for r in group]) / median([r["save_s"] for r in other])
                fewer = 1 - group[0]["bytes"] / other[0]["bytes"]
                text = f"{key[2]}, {key[0]}: compressing {plain} takes {slower:.1f} times as long and saves {fewer:.1%} of the bytes; it should not be the default."
                if slower > _SLOW:
                    items.append(_item(text, "cost", *key))
    return items


def _too_many_bytes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Name the ways whose files are larger than another's for the same values."""
    items, groups = [], _cost_groups(rows)
    for key, group in groups.items():
        same = [
            other[0]["bytes"]
            for name, other in groups.items()
            if name[:3] == key[:3] and other[0]["whole"] and not other[0]["packed"]
        ]
        if same and group[0]["bytes"] > _LARGE * min(same):
            text = f"{key[2]} {key[3]}, {key[0]}: {group[0]['bytes'] / min(same):.2f} times the bytes of the framework's smallest uncompressed way."
            items.append(_item(text, "cost", *key))
    return items


def _defaults_that_diverge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']}: what one call saves leaves out {row['left_out']}; the resumed run is another run "
              f"({row['distance']:.2%} of the weights).", "determinism", row["framework"], row["run"], row["left_out"])
        for row in rows
        if row["part"] == "determinism" and row["status"] == MEASURED and row["run"] == "what one call saves" and not row["same_bits"]
    ]  # fmt: skip


def _unnoticed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']} {row['way']}: flipped bits are loaded as if they were weights; a digest would tell.",
              "mechanisms", row["framework"], row["way"])
        for row in _mechanisms(rows) if "wrong values" in row["damage"]
    ]  # fmt: skip


def _not_atomic(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']} {row['way']}: a save killed half-way over an older checkpoint leaves neither; the old one should go when the new one is whole.",
              "mechanisms", row["framework"], row["way"])
        for row in _mechanisms(rows) if "nothing" in row["killed"] or "other" in row["killed"]
    ]  # fmt: skip


def _elsewhere(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']}, saved by {row['scheme']}: what {row['saved_by']} workers saved, {row['workers']} cannot all load: {row['found']}.",
              "elsewhere", row["framework"], row["scheme"], row["saved_by"], row["workers"])
        for row in rows if row["part"] == "elsewhere" and row["status"] == MEASURED and not row["loads"]
    ]  # fmt: skip


def _rotation(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _item(f"{row['framework']} {row['way']}: told to keep 2 of 7 steps, it kept {row['kept']}.", "mechanisms", row["framework"], row["way"])
        for row in _mechanisms(rows) if row["kept"] not in (None, 2)
    ]  # fmt: skip
