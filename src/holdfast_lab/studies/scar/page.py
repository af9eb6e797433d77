"""The page of the partial recovery study: reductions with their intervals, in tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.checkpoint.priority_choice import CHOICES
from holdfast_lab.studies.base import Row
from holdfast_lab.studies.scar.bound import bound_sections
from holdfast_lab.studies.scar.claims import skews_of
from holdfast_lab.studies.scar.figures import AXIS, LATE, READ, figure, pivot, row_of, rows_of, shown, unbroken
from holdfast_lab.studies.scar.page_further import (
    chosen_table,
    every_table,
    further_figure,
    further_table,
    several_table,
)
from holdfast_lab.studies.scar.policies import (
    FRACTIONS,
    HINDSIGHT,
    HINDSIGHT_WHO,
    NO_CHECKPOINT,
    NODES,
    PARTIAL,
    RESEED,
    SCAR,
    TRADITIONAL,
    chosen,
)
from holdfast_lab.studies.scar.rows import TrialRows
from holdfast_lab.studies.scar.save import held_table
from holdfast_lab.studies.scar.tables import LIVE_TABLE, NOT_RUN_TABLE, pilot_table, rates_table
from holdfast_lab.studies.scar.text import policies_table
from holdfast_lab.studies.scar.verdicts import LEAST, MOST, partial_of, where_it_lies
from holdfast_lab.studies.sections import Section, intervals, number, points, table, text

_PRIORITY = chosen("full", "priority", FRACTIONS[-1])
_ODD = (
    "Odd: number of censored trials, and of negative ones. Censored: the run did not reach every level, and counts as "
    "if it did so when it was stopped. Negative: the failure helped."
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page."""
    trials, skews = TrialRows(rows), skews_of(rows)
    return [
        _headline_figure(trials),
        _headline_table(trials, skews),
        _scatter(trials, skews),
        pivot(
            trials,
            "partial",
            "Partial recovery alone",
            "From full saves, by the number of failed nodes of four. Expected: 75, 50, 25 %.",
            {partial_of(nodes): f"{nodes}/{NODES} lost" for nodes in range(1, NODES)},
        ),
        _choices_figure(trials),
        _choices_table(trials, PARTIAL, "Choice of blocks and save interval: only lost blocks are restored"),
        _choices_table(trials, "full", "Choice of blocks and save interval: all blocks are restored"),
        pivot(
            trials,
            "shares",
            "SCAR by share of lost blocks",
            "",
            {SCAR if nodes == NODES // 2 else f"{SCAR}, {nodes}/{NODES} lost": f"{nodes}/{NODES} lost" for nodes in range(1, NODES)},
        ),
        policies_table(trials),
        _controls_table(trials),
        several_table(trials),
        further_figure(trials),
        further_table(trials),
        chosen_table(trials),
        *bound_sections(rows),
        LIVE_TABLE,
        held_table(),
        every_table(trials),
        rates_table(rows),
        pilot_table(rows),
        NOT_RUN_TABLE,
    ]  # fmt: skip


# -- the headline


def _headline_figure(trials: TrialRows) -> Section:
    names = {PARTIAL: "partial recovery", _PRIORITY: "prioritised saves, r = 1/8", SCAR: "both: SCAR"}
    rows = [
        row_of(program, policy, cell) | {"policy": name}
        for program in trials.stated()
        for policy, name in names.items()
        if (cell := trials.cell(program, policy))
    ]
    note = f"{LATE}Half of the blocks lost. Shaded: the abstract's range, {LEAST:.0f} to {MOST:.0f} %."
    return figure(
        intervals,
        "headline-figure",
        "Partial recovery, prioritised checkpoints, and both",
        note,
        rows,
        by=["program"],
        series=["policy"],
        x=["percent", AXIS],
        band=[LEAST, MOST],
    )


def _headline_table(trials: TrialRows, skews: Mapping[str, float]) -> Section:
    lines = []
    for program in trials.stated():
        late, every = trials.cell(program, SCAR), trials.cell(program, SCAR, late=False)
        base = trials.cell(program, TRADITIONAL)
        if late is None or every is None or base is None:
            continue
        lines.append(
            row_of(program, SCAR, late)
            | {
                "all": shown(every.reduction, every.ci),
                "both_trials": unbroken(f"{late.trials}, {every.trials}"),
                "range": where_it_lies(100 * late.reduction).removesuffix(" the range"),
                "base": unbroken(f"{base.cost:.1f} [{base.cost_ci[0]:.1f}, {base.cost_ci[1]:.1f}]"),
                "skew": f"{100 * skews[program]:.0f}" if program in skews else None,
            }
        )
    return table(
        "headline",
        "The abstract's number: SCAR with r = 1/8, half of the blocks lost",
        f"{READ} T >= C: failures after the first full save; before it, traditional recovery restores the initial "
        "state. Skew: share of the squared drift from iteration 3 C to 4 C in the top eighth of the blocks, in a "
        f"failure-free run. Trials: with T >= C, and all. {_ODD}",
        lines,
        by=["program"],
        columns=[
            text("reduction", "saved, T >= C", "%"),
            text("range", "of 78 to 95 %"),
            text("all", "saved, all", "%"),
            text("skew", "skew", "%"),
            text("cost_text", "cost", "iterations"),
            text("base", "traditional", "iterations"),
            text("both_trials", "number", "trials"),
            text("odd", "odd", "trials"),
        ],
    )


def _scatter(trials: TrialRows, skews: Mapping[str, float]) -> Section:
    rows = [
        row | {"skew": 100 * skews[row["program"]], "family": row["program"].split("-")[0]}
        for row in rows_of(trials, trials.stated(), [SCAR])
        if row["program"] in skews
    ]
    return figure(
        points,
        "skew",
        "Iterations saved by SCAR, by skew of the drift",
        f"{LATE}Skew: share of the drift in the top eighth of the blocks, measured in a failure-free run. If all "
        f"blocks move equally, priority has no effect. Shaded: {LEAST:.0f} to {MOST:.0f} %.",
        rows,
        series=["family"],
        label="program",
        x=["skew", "share of the drift in the top eighth of the blocks, %"],
        y=["percent", AXIS],
        band=[LEAST, MOST],
    )


# -- which blocks, and how near that is to the best


def _fraction(fraction: float) -> str:
    return f"r = 1/{round(1 / fraction)}"


def _choices_figure(trials: TrialRows) -> Section:
    rows = [
        row_of(program, choice, cell) | {"fraction": _fraction(fraction)}
        for program in trials.stated()
        for fraction in FRACTIONS
        for choice in CHOICES
        if (cell := trials.cell(program, chosen(PARTIAL, choice, fraction)))
    ]
    return figure(
        intervals,
        "choices-figure",
        "Priority, round-robin and random",
        f"{LATE}Half of the blocks lost, only these are restored; the same bytes at every r.",
        rows,
        by=["program", "fraction"],
        series=["policy"],
        x=["percent", AXIS],
    )


def _choices_table(trials: TrialRows, restore: str, title: str) -> Section:
    lines = []
    for program in trials.stated():
        whole = trials.cell(program, PARTIAL if restore == PARTIAL else TRADITIONAL)
        for choice in CHOICES:
            cells = {
                fraction: cell
                for fraction in FRACTIONS
                if (cell := trials.cell(program, chosen(restore, choice, fraction)))
            }
            if whole and cells:
                line = {_fraction(fraction): shown(cell.reduction, cell.ci) for fraction, cell in cells.items()}
                lines.append({"program": program, "choice": choice, "whole": shown(whole.reduction, whole.ci), **line})
    same = "traditional recovery itself" if restore != PARTIAL else "partial recovery alone"
    return table(
        f"choices-{restore}",
        title,
        f"{LATE}{READ} Half of the blocks lost. r = 1 is {same}, for every choice.",
        lines,
        by=["program", "choice"],
        columns=[text("whole", "r = 1", "%"), *(text(_fraction(r), _fraction(r), "%") for r in FRACTIONS)],
    )


def _controls_table(trials: TrialRows) -> Section:
    lines = []
    for program in trials.stated():
        for policy in (NO_CHECKPOINT, SCAR, HINDSIGHT, HINDSIGHT_WHO, RESEED):
            cell, gap = trials.cell(program, policy), trials.gap(program, policy, SCAR)
            if cell and gap:
                lines.append(row_of(program, policy, cell) | {"gap": shown(*gap) if policy != SCAR else None})
    return table(
        "controls",
        "Distance from the optimum: no checkpoint, SCAR, and hindsight",
        f"{LATE}{READ} Hindsight: every save of r = 1/8 takes the blocks that minimize the sum of squared distances to "
        "the state at the failure. It knows when nodes fail, and in the second variant also which. It estimates the "
        "least cost of any choice with the same bytes: its distance is minimal, up to a block or two, but its cost "
        "need not be. Nothing lost, other randomness: the cost of chance alone. Above SCAR: in points, paired. "
        "Restored to: distance from the lost state in the program's own metric (Euclidean; for documents, tokens with "
        "another topic), not comparable between programs. Odd: number of censored trials, and of negative ones.",
        lines,
        by=["program", "policy"],
        columns=[
            text("reduction", "saved", "%"),
            text("gap", "above SCAR", "points"),
            text("cost_text", "cost", "iterations"),
            number("error", "restored to", "distance"),
            text("odd", "odd", "trials"),
        ],
    )
