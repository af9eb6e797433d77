"""How the study of partial recovery shows its rows: reductions with their intervals, in tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.running_choice import CHOICES
from holdfast.study.base import MEASURED, Row
from holdfast.study.scar_bound import bound_sections
from holdfast.study.scar_claims import LEAST, MOST, partial_of, show, where_it_lies
from holdfast.study.scar_policies import (
    HINDSIGHT,
    HINDSIGHT_WHO,
    LINE,
    LINE_INT8,
    NO_CHECKPOINT,
    NODES,
    PARTIAL,
    RESEED,
    SCAR,
    TRADITIONAL,
)
from holdfast.study.scar_rows import Cell, Trials
from holdfast.study.scar_tables import live_table, not_run_table, pilot_table, rates_table

_LATE = "Failures after the first full save (T >= C). "
_READ = "Iterations saved against going back to a full checkpoint, %, with 95 % intervals by paired bootstrap over the trials."
_AXIS = "iterations saved, %"
_LIMITS = [-60, 110]
_FRACTIONS = ("1/2", "1/4", "1/8")


def sections(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the sections of the page."""
    trials = Trials(rows)
    skews = {row["program"]: row["skew"] for row in rows if row["part"] == "pilot" and row["status"] == MEASURED}
    return [
        _headline_figure(trials),
        _headline_table(trials, skews),
        _scatter(trials, skews),
        _pivot(
            trials,
            "partial",
            "Partial recovery alone",
            "From full saves, by how many of four nodes die. Expected: 75, 50, 25.",
            {partial_of(nodes): f"{nodes}/{NODES} lost" for nodes in range(1, NODES)},
        ),
        _choices(trials, "full", "Which blocks are saved, and how often: all go back"),
        _choices(trials, PARTIAL, "Which blocks are saved, and how often: only the lost go back"),
        _pivot(
            trials,
            "shares",
            "SCAR by how much is lost",
            "",
            {SCAR if nodes == NODES // 2 else f"{SCAR}, {nodes}/{NODES} lost": f"{nodes}/{NODES} lost" for nodes in range(1, NODES)},
        ),
        _further_figure(trials),
        _further_table(trials),
        _chosen_table(trials),
        _controls_table(trials),
        _several_table(trials),
        *bound_sections(rows),
        live_table(),
        _every_table(trials),
        rates_table(),
        pilot_table(),
        not_run_table(),
    ]  # fmt: skip


def _row(program: str, policy: str, cell: Cell) -> Row:
    """Return a row of the page; numbers of a picture in percent."""
    return {
        "program": program,
        "policy": policy,
        "percent": _percent(cell.reduction),
        "low": _percent(cell.ci[0]),
        "high": _percent(cell.ci[1]),
        "reduction": show(cell.reduction, cell.ci),
        "trials": cell.trials,
        "cost": cell.cost,
        "cost_text": f"{cell.cost:.2f} [{cell.cost_ci[0]:.2f}, {cell.cost_ci[1]:.2f}]",
        "censored": cell.censored,
        "negative": cell.negative,
        "bytes": cell.bytes,
        "error": cell.error,
    }


def _percent(share: float) -> float | None:
    return 100 * share if math.isfinite(share) else None


def _cells(trials: Trials, programs: Sequence[str], policies: Sequence[str], *, late: bool = True) -> list[Row]:
    return [
        _row(program, policy, cell)
        for program in programs
        for policy in policies
        if (cell := trials.cell(program, policy, late=late))
    ]


def _figure(kind: str, name: str, title: str, note: str, rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    about = {"kind": kind, "id": name, "title": title, "note": note, "where": {}, "rows": list(rows)}
    return about | {"interval": ["low", "high"], **more}


def _table(
    name: str,
    title: str,
    note: str,
    rows: Sequence[Mapping[str, Any]],
    by: Sequence[str],
    columns: Sequence[Sequence[str]],
) -> dict[str, Any]:
    about = {"kind": "table", "id": name, "title": title, "note": note, "where": {}, "rows": list(rows)}
    return about | {"by": list(by), "columns": [list(column) for column in columns]}


def _pivot(trials: Trials, name: str, title: str, note: str, policies: Mapping[str, str]) -> dict[str, Any]:
    """Return a table with a line for each program and a column for each policy, by its heading."""
    lines = []
    for program in trials.stated():
        found = _cells(trials, [program], list(policies))
        lines += [{"program": program, **{row["policy"]: row["reduction"] for row in found}}] if found else []
    columns = [[policy, heading, "text"] for policy, heading in policies.items()]
    return _table(name, title, f"{_LATE}{_READ} {note}".strip(), lines, ["program"], columns)


# ---------------------------------------------------------------------------------------------
# The paper


def _headline_figure(trials: Trials) -> dict[str, Any]:
    rows = _cells(trials, trials.stated(), [PARTIAL, "full, priority, r = 1/8", SCAR])
    note = f"{_LATE}Half of the blocks lost. Shaded: what the abstract says, {LEAST:.0f} to {MOST:.0f} %."
    return _figure(
        "intervals",
        "headline-figure",
        "Partial recovery, prioritised checkpoints, and both",
        note,
        rows,
        by=["program"],
        series=["policy"],
        x=["percent", _AXIS],
        band=[LEAST, MOST],
        limits=_LIMITS,
    )


def _headline_table(trials: Trials, skews: Mapping[str, float]) -> dict[str, Any]:
    lines = []
    for program in trials.stated():
        late, every = trials.cell(program, SCAR), trials.cell(program, SCAR, late=False)
        base = trials.cell(program, TRADITIONAL)
        if late is None or every is None or base is None:
            continue
        lines.append(
            _row(program, SCAR, late)
            | {
                "all": show(every.reduction, every.ci),
                "all_trials": every.trials,
                "range": where_it_lies(100 * late.reduction),
                "base": f"{base.cost:.2f} [{base.cost_ci[0]:.2f}, {base.cost_ci[1]:.2f}]",
                "skew": skews.get(program),
            }
        )
    return _table(
        "headline",
        "The abstract's number: SCAR with r = 1/8, half of the blocks lost",
        f"{_READ} T >= C: failures after the first full save; before it, what traditional recovery restores is the beginning. "
        "Skew: the share of the drift from iteration 3 C to 4 C, in squares, that the top eighth of the blocks has, in an "
        "undisturbed run. Censored: trials that did not get to every level; they count as if they got there when they were given up. "
        "Negative: trials in which the failure helped.",
        lines,
        ["program"],
        [
            ["reduction", "saved, T >= C", "text"],
            ["all", "saved, all failures", "text"],
            ["range", "against 78 to 95", "text"],
            ["skew", "skew", "%"],
            ["cost_text", "its cost, iterations", "text"],
            ["base", "traditional cost", "text"],
            ["trials", "trials, T >= C", "number"],
            ["all_trials", "all", "number"],
            ["censored", "censored", "number"],
            ["negative", "negative", "number"],
        ],
    )


def _scatter(trials: Trials, skews: Mapping[str, float]) -> dict[str, Any]:
    rows = [
        row | {"skew": 100 * skews[row["program"]], "family": row["program"].split("-")[0]}
        for row in _cells(trials, trials.stated(), [SCAR])
        if row["program"] in skews
    ]
    return _figure(
        "points",
        "skew",
        "The skew of the drift predicts what SCAR saves",
        f"{_LATE}An undisturbed run tells the skew: the share of the drift that the top eighth of the blocks has. "
        "Where all blocks move alike, there is nothing to choose.",
        rows,
        series=["family"],
        label="program",
        x=["skew", "share of the drift in the top eighth of the blocks, %"],
        y=["percent", _AXIS],
        band=[LEAST, MOST],
        limits=_LIMITS,
    )


def _choices(trials: Trials, restore: str, title: str) -> dict[str, Any]:
    policies = {
        f"{restore}, {choice}, r = {fraction}": f"{choice}, r = {fraction}"
        for choice in CHOICES
        for fraction in _FRACTIONS
    }
    full = {PARTIAL: "full saves"} if restore == PARTIAL else {}
    note = "r = 1 is traditional recovery itself: 0." if restore == "full" else "Half of the blocks lost."
    return _pivot(trials, f"choices-{restore}", title, note, full | policies)


# ---------------------------------------------------------------------------------------------
# Beyond the paper


def _further(trials: Trials, program: str) -> list[str]:
    """Return the policies of a program that are not the paper's."""
    known = (TRADITIONAL, PARTIAL, "full", NO_CHECKPOINT, RESEED, HINDSIGHT, HINDSIGHT_WHO)
    return [
        policy
        for policy in trials.policies(program)
        if policy not in known
        and not policy.startswith((f"{PARTIAL}, p", f"{PARTIAL}, r", "full, ", f"{PARTIAL}, 1", f"{PARTIAL}, 3"))
    ]


def _further_figure(trials: Trials) -> dict[str, Any]:
    rows = _cells(trials, trials.programs(), [SCAR, LINE, LINE_INT8])
    return _figure(
        "intervals",
        "further-figure",
        "Dead reckoning, at the same bytes",
        f"{_LATE}Half of the blocks lost, r = 1/8. A lost block is restored to where the line through its last two saves leads, and "
        "what is saved is what is farthest from there; int8: saved as steps of a byte, of which more fit.",
        rows,
        by=["program"],
        series=["policy"],
        x=["percent", _AXIS],
        limits=_LIMITS,
    )


def _further_table(trials: Trials) -> dict[str, Any]:
    lines = []
    for program in trials.programs():
        for row in _cells(trials, [program], [SCAR, *_further(trials, program)]):
            gap = trials.gap(program, row["policy"], SCAR)
            lines.append(row | {"gap": show(*gap) if gap and row["policy"] != SCAR else None})
    return _table(
        "further",
        "Beyond the paper, at the same bytes",
        f"{_LATE}{_READ} Half of the blocks lost. Above SCAR: in points, paired.",
        lines,
        ["program", "policy"],
        [
            ["reduction", "saved", "text"],
            ["gap", "above SCAR", "text"],
            ["cost_text", "cost, iterations", "text"],
            ["bytes", "bytes per iteration", "number"],
            ["trials", "trials", "number"],
            ["censored", "censored", "number"],
            ["negative", "negative", "number"],
        ],
    )


def _chosen_table(trials: Trials) -> dict[str, Any]:
    lines = []
    for program in trials.programs():
        policy = trials.chosen(program)
        if policy is None or (cell := trials.cell(program, policy)) is None:
            continue
        rehearsed, gap = trials.cell(program, policy, "rehearsal"), trials.gap(program, policy, SCAR)
        lines.append(
            _row(program, policy, cell)
            | {
                "rehearsed": show(rehearsed.reduction, rehearsed.ci) if rehearsed else None,
                "gap": show(*gap) if gap else None,
            }
        )
    return _table(
        "chosen",
        "One policy, chosen by the system",
        f"{_LATE}{_READ} Failures were rehearsed on copies of the state of an undisturbed run, with every policy that needs no foresight; "
        "the one of the least mean cost was chosen, and then tried on seeds that it was not chosen on.",
        lines,
        ["program", "policy"],
        [
            ["rehearsed", "in rehearsal", "text"],
            ["reduction", "on fresh seeds", "text"],
            ["gap", "above SCAR", "text"],
            ["trials", "trials", "number"],
        ],
    )


def _controls_table(trials: Trials) -> dict[str, Any]:
    lines = []
    for program in trials.stated():
        for row in _cells(trials, [program], [NO_CHECKPOINT, SCAR, HINDSIGHT, HINDSIGHT_WHO, RESEED]):
            every = trials.cell(program, row["policy"], late=False)
            lines.append(row | {"all": show(every.reduction, every.ci) if every else None})
    return _table(
        "controls",
        "How near to the best: no checkpoint, SCAR, and hindsight",
        f"{_READ} Hindsight: at every save of r = 1/8, the blocks were chosen that make the sum of the squares of the distances to the state at "
        "the failure the least; it knows when nodes die, and in the other line who does too. It is an estimate of the least cost that any choice of the same "
        "bytes could have had: the distance is the least, up to a block or two, but the cost need not be. Nothing lost, other randomness: what chance alone costs.",
        lines,
        ["program", "policy"],
        [
            ["reduction", "saved, T >= C", "text"],
            ["all", "saved, all failures", "text"],
            ["cost_text", "cost, iterations", "text"],
            ["error", "distance restored to", "number"],
            ["trials", "trials", "number"],
            ["censored", "censored", "number"],
        ],
    )


def _several_table(trials: Trials) -> dict[str, Any]:
    lines = [
        _row(program, policy, cell) | {"failures": failures}
        for failures in (2, 3)
        for program in trials.programs(f"several {failures}")
        for policy in trials.policies(program, f"several {failures}")
        if (cell := trials.cell(program, policy, f"several {failures}", late=False))
    ]
    return _table(
        "several",
        "Several failures in one run",
        f"{_READ} Half of the blocks lost each time, other blocks each time.",
        lines,
        ["program", "failures", "policy"],
        [
            ["reduction", "saved", "text"],
            ["cost_text", "cost, iterations", "text"],
            ["trials", "trials", "number"],
            ["censored", "censored", "number"],
        ],
    )


def _every_table(trials: Trials) -> dict[str, Any]:
    lines = []
    for program in trials.programs():
        for row in _cells(trials, [program], trials.policies(program)):
            every = trials.cell(program, row["policy"], late=False)
            lines.append(row | {"all": show(every.reduction, every.ci) if every else None})
    return _table(
        "every",
        "Every policy with every program",
        f"{_READ}",
        lines,
        ["program", "policy"],
        [
            ["reduction", "saved, T >= C", "text"],
            ["all", "saved, all failures", "text"],
            ["cost_text", "cost, iterations", "text"],
            ["error", "distance restored to", "number"],
            ["bytes", "bytes per iteration", "number"],
            ["trials", "trials, T >= C", "number"],
            ["censored", "censored", "number"],
            ["negative", "negative", "number"],
        ],
    ) | {"folded": True}
