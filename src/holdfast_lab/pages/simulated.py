"""The page of a simulated scenario or of a plan, rendered from ``results.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.base.formatting import DASH, percent
from holdfast.errors import ConfigError
from holdfast.observe.page.templates import environment
from holdfast.summary.files import check_keys
from holdfast_lab.pages import advice
from holdfast_lab.pages.study import shown_section
from holdfast_lab.pages.survival import survival_section
from holdfast_lab.pages.words import duration

Row = dict[str, Any]
Results = Mapping[str, Any]

KINDS = ("scenario", "plan")
"""Values of ``"simulated"`` in ``results.json``."""

_PARTS = {
    "lost": "recompute",
    "save": "save",
    "detect": "detect",
    "regroup": "regroup",
    "load": "load",
    "restart": "start",
    "rejoin": "rejoin",
    "wait": "wait",
}


def page_of(results: dict[str, Any], path: Path) -> str:
    """Return the page of the simulation in ``path``.

    Raises:
        ConfigError: if ``path`` does not hold the results of a simulation.
    """
    needed = {"simulated": str, "title": str, "rows": list, "settings": dict}
    needed |= {"known": list, "map": list, "question": dict} if results["simulated"] == "plan" else {}
    where = f"{path} does not hold the results of a simulation"
    if results["simulated"] not in KINDS:
        raise ConfigError(f"{where}: 'simulated' is missing or of the wrong type")
    check_keys(results, needed, where)
    return render_simulated(results)


def render_simulated(results: Results) -> str:
    """Return the page of a simulation or a plan.

    Args:
        results: The contents of ``results.json``.
    """
    is_plan = results["simulated"] == "plan"
    message, _, lead = (advice.headline(results) if is_plan else _lead(results)).partition(". ")
    rows = [shown_cells(row) for row in results["rows"]]
    sections = [*(_plan_sections(results, rows) if is_plan else _sections(rows))]
    sections += [survival_section(log, number) for number, log in enumerate(results.get("logs", ()), 1)]
    shown = [shown_section(section, rows) for section in sections]
    return (
        environment(Path(__file__).parent)
        .get_template("simulated.html")
        .render(
            title=results["title"],
            kind=results["simulated"],
            message=message.removesuffix("."),
            lead=lead,
            command=advice.command(results) if is_plan else "",
            reasons=advice.reasons(results) if is_plan else [],
            sections=[section for section in shown if section],
            known=advice.assumption_lines(results["known"]) if is_plan else [],
            settings=results["settings"],
        )
    )


def shown_cells(row: Mapping[str, Any]) -> Row:
    """Return a row with its numbers also as text: ``goodput_shown`` and so on, with their 95 % intervals."""
    save = (
        f"{duration(row['interval_s'])} ({advice.counted(row['save_every'], 'step')})" if row["save_every"] else "never"
    )
    train = _train(row)
    hours = DASH if row["worker_hours"] is None else _number(row, "worker_hours")
    failures = "failures" if "failures" in row else "failures_per_day"
    return {
        **row,
        **{f"{part}_percent": 100 * row[f"in_{part}"] for part in _PARTS},
        "saves_shown": save,
        "goodput_shown": _percent(row, "goodput"),
        "lost_shown": _percent(row, "lost_share"),
        "train_shown": train,
        "hours_shown": hours,
        "failures_shown": _number(row, failures),
        "stale_shown": f"{row['stale_iterations']:g}" if "stale_iterations" in row else DASH,
        "where": ", ".join(f"{name} {percent(row[f'in_{part}'])}" for part, name in _PARTS.items() if row[f"in_{part}"] >= 5e-4),
    }  # fmt: skip


def columns(results: Results) -> list[tuple[str, str]]:
    """Return the columns of the strategy table: key and heading."""
    per_day = results["simulated"] == "plan"
    stale = [("stale_shown", "steps a failure costs")] if any("stale_iterations" in r for r in results["rows"]) else []
    return [
        ("saves_shown", "checkpoint every"),
        ("goodput_shown", "goodput"),
        ("lost_shown", "work lost"),
        ("train_shown", "time to train"),
        ("hours_shown", "worker-hours"),
        ("failures_shown", "failures a day" if per_day else "failures"),
        *stale,
    ]


def map_table(cells: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the map as text: headings, and a line for each mean time between failures of a node."""
    sizes = list(dict.fromkeys(cell["workers"] for cell in cells))
    lines: dict[str, list[str]] = {}
    for cell in cells:
        lines.setdefault(duration(cell["mtbf_node_s"]), []).append(_field(cell))
    return [f"{size:,}" for size in sizes], [[name, *fields] for name, fields in lines.items()]


def _train(row: Mapping[str, Any]) -> str:
    if "train_s" not in row:  # a scenario: it ends when the job finishes, or at the simulated horizon
        if row["steps_asked"] is None:
            return DASH
        if row["finished"] == 0:
            return f"not finished in {duration(row['horizon_s'])}"
        late = "" if row["finished"] == 1 else f", {percent(1 - row['finished'], digits=0)} not finished"
        return f"{duration(row['total_s'])} ({_between(row, 'total_s')}{late})"
    if row["train_s"] is None:
        return "never"
    return f"{duration(row['train_s'])} ({_between(row, 'train_s')})"


def _between(row: Mapping[str, Any], name: str) -> str:
    low, high = duration(row[f"{name}_low"]), duration(row[f"{name}_high"])
    unit = low.rpartition(" ")[2]
    same = all(text.endswith(f" {unit}") for text in (high, duration(row[name])))
    return f"{low.removesuffix(f' {unit}')} to {high.removesuffix(f' {unit}')}" if same else f"{low} to {high}"


def _percent(row: Mapping[str, Any], name: str) -> str:
    low, high = (max(min(row[f"{name}_{end}"], 1.0), 0.0) for end in ("low", "high"))
    return f"{percent(row[name], digits=2)} ({100 * low:.2f} to {100 * high:.2f})"


def _number(row: Mapping[str, Any], name: str) -> str:
    value, ends = row[name], [row[f"{name}_{end}"] for end in ("low", "high")]
    scale, unit = (1e6, " million") if value >= 1e6 else (1.0, "")
    digits = 4 if value < 0.1 else 2 if unit or value < 10 else 1 if value < 100 else 0
    text = f"{value / scale:,.{digits}f}"
    if all(end is not None for end in ends):
        text += f" ({ends[0] / scale:,.{digits}f} to {ends[1] / scale:,.{digits}f})"
    return text + unit


def _field(cell: Mapping[str, Any]) -> str:
    best = max(value for name, value in cell.items() if name.startswith("goodput_"))
    shown = best if cell["wins"] in ("any", "none") else cell[f"goodput_{cell['wins']}"]
    spares = f" +{cell['spares']:,}" if cell["spares"] else ""
    return f"{cell['wins']} {100 * shown:.1f} | {100 * cell['goodput_relaunch']:.1f}{spares}"


def _lead(results: Results) -> str:
    best = max(results["rows"], key=lambda row: row["goodput"])
    others = [row for row in results["rows"] if row is not best]
    if not others:
        return " ".join([f"{best['name']}: goodput {percent(best['goodput'])}.", *price_lines(results)])
    close = [row for row in others if row["goodput_high"] >= best["goodput_low"]]
    text = f"{best['name']} has the highest goodput, {percent(best['goodput'])}"
    text += f"; {', '.join(row['name'] for row in close)}: no significant difference" if close else ""
    worst = min(others, key=lambda row: row["goodput"])
    text = f"{text}. {worst['name']} has the lowest, {percent(worst['goodput'])}."
    return " ".join([text, *price_lines(results)])


def price_lines(results: Results) -> list[str]:
    """Return what a failure costs under ``partial`` with each of these numbers, in sentences."""
    return [advice.stale(row, row["stale_source"]) for row in results["rows"] if "stale_source" in row]


# -- sections


def _sections(rows: Sequence[Row]) -> list[dict[str, Any]]:
    heads = columns({"simulated": "scenario", "rows": rows})
    return [_table(heads), *_bars(rows)]


def _plan_sections(results: Results, rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        _table(columns(results)),
        *_bars(rows),
        *_interval_sections(results),
        *([_map_section(results)] if results["map"] else []),
    ]


def _table(heads: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "strategies",
        "title": "Strategies compared",
        "note": "Simulated. 95 % intervals of the mean in brackets. Every strategy was given the same failures.",
        "where": {},
        "by": ["name"],
        "columns": [[key, heading, "text"] for key, heading in heads],
    }


def _bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    bars = {
        "kind": "bars",
        "id": "time",
        "title": "Where lost time goes",
        "note": "Simulated. recompute: lost steps are computed again; save, detect, regroup, load, start, rejoin: training "
        "is blocked by it; wait: too few workers are available. The rest up to 100 % is useful work, some of it "
        "with fewer workers.",
        "where": {},
        "by": ["name"],
        "values": [[f"{part}_percent", name] for part, name in _PARTS.items()],
        "unit": "% of the time",
    }
    return [bars] if any(row[f"in_{part}"] for row in rows for part in _PARTS) else []


def _interval_sections(results: Results) -> list[dict[str, Any]]:
    table = {
        "kind": "table",
        "id": "interval",
        "title": "Checkpoint interval",
        "note": "Work between two checkpoints: from Young's and Daly's formulas, at the minimum of Daly's model (exact), "
        "and as simulated, with the range where goodput is within 0.1 points of the best. Only failures after which "
        "a checkpoint is loaded count.",
        "where": {},
        "by": ["strategies"],
        "rows": advice.interval_lines(results),
        "columns": [
            ["back", "loads one every", "text"],
            ["young", "Young", "text"],
            ["daly", "Daly", "text"],
            ["exact", "exact", "text"],
            ["simulated", "simulated", "text"],
            ["range", "equally good", "text"],
        ],
    }
    if results["optimum"] is None:
        return [table]
    tried = [_tried_point(one, results["shown"]) for one in results["optimum"]["tried"]]
    row = advice.shown_row(results)
    low, high = min(p["goodput_low"] for p in tried), max(p["goodput_high"] for p in tried)
    curves = [
        [name, [row[key] / 60] * 2, [low, high]]
        for key, name in (("young_s", "Young"), ("exact_s", "exact"))
        if row[key]
    ]
    points = {
        "kind": "points",
        "id": "tried",
        "title": f"Goodput of {results['shown']} over the interval",
        "note": "Simulated, all with the same failures, so differences are more certain than the intervals suggest.",
        "where": {},
        "rows": tried,
        "x": ["minutes", "work between two checkpoints, minutes"],
        "y": ["goodput", "goodput, %"],
        "series": ["strategy"],
        "interval": ["goodput_low", "goodput_high"],
        "log": ["x"],
        "curves": curves,
    }
    return [table, points]


def _tried_point(one: Mapping[str, Any], name: str) -> Row:
    goodput = {key: 100 * one[key] for key in ("goodput", "goodput_low", "goodput_high")}
    return {"strategy": name, "minutes": one["interval_s"] / 60, **goodput}


def _map_section(results: Results) -> dict[str, Any]:
    cells = [
        {
            "workers": f"{cell['workers']:,}",
            "mtbf": duration(cell["mtbf_node_s"]),
            "gain": max(value for name, value in cell.items() if name.startswith("goodput_"))
            - cell["goodput_relaunch"],
            "text": _field(cell).replace(" ", "\n", 1),
        }
        for cell in results["map"]
    ]
    return {
        "kind": "map",
        "id": "map",
        "title": "Best strategy by workers and node failure rate",
        "note": MAP_NOTE,
        "where": {},
        "rows": cells,
        "x": ["workers", "workers"],
        "y": ["mtbf", "MTBF of a node"],
        "shade": "gain",
        "text": "text",
    }


MAP_NOTE = (
    "Simulated: the best of rollback, forward and relaunch, its goodput in %, and after the bar that of relaunch. "
    "any: relaunch is less than half a point behind; none: no useful progress. +8: with eight spare workers, as a plan "
    "for that cluster recommends. Step and checkpoint times are the same everywhere."
)
"""Explains the cells of the map."""
