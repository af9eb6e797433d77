"""Page sections about policies beyond the paper, and the table of every policy with every program."""

from __future__ import annotations

from holdfast_lab.studies.scar.figures import AXIS, LATE, READ, figure, row_of, rows_of, shown
from holdfast_lab.studies.scar.policies import (
    CALIBRATED,
    HINDSIGHT,
    HINDSIGHT_WHO,
    LINE,
    LINE_INT8,
    NO_CHECKPOINT,
    PARTIAL,
    RESEED,
    SCAR,
    TRADITIONAL,
)
from holdfast_lab.studies.scar.rows import TrialRows
from holdfast_lab.studies.scar.text import CHOSEN
from holdfast_lab.studies.sections import Section, intervals, number, table, text
from holdfast_lab.studies.stats import RESAMPLES


def _further(trials: TrialRows, program: str) -> list[str]:
    """Return the policies of a program that are not in the paper."""
    known = (TRADITIONAL, PARTIAL, "full", NO_CHECKPOINT, RESEED, HINDSIGHT, HINDSIGHT_WHO)
    return [
        policy
        for policy in trials.policies(program)
        if policy not in known
        and not policy.startswith((f"{PARTIAL}, p", f"{PARTIAL}, r", "full, ", f"{PARTIAL}, 1", f"{PARTIAL}, 3"))
    ]


def further_figure(trials: TrialRows) -> Section:
    """Return the plot that compares dead reckoning with SCAR."""
    rows = rows_of(trials, trials.programs(), [SCAR, LINE, CALIBRATED, LINE_INT8])
    return figure(
        intervals,
        "further-figure",
        "Dead reckoning, at the same bytes",
        f"{LATE}Half of the blocks lost, r = 1/8. A lost block is extrapolated linearly from its last two saves, and "
        "the blocks farthest from their extrapolation are saved. Calibrated: a lost block moves only by the share of "
        "its extrapolation that survivors have moved of theirs. int8: differences are saved in one byte each, so that "
        "more blocks fit.",
        rows,
        by=["program"],
        series=["policy"],
        x=["percent", AXIS],
    )


def further_table(trials: TrialRows) -> Section:
    """Return the table of all policies that are not in the paper, compared with SCAR."""
    lines = []
    for program in trials.programs():
        for policy in (SCAR, *_further(trials, program)):
            cell, gap = trials.cell(program, policy), trials.gap(program, policy, SCAR)
            if cell and gap:
                lines.append(row_of(program, policy, cell) | {"gap": shown(*gap) if policy != SCAR else None})
    return table(
        "further",
        "Beyond the paper, at the same bytes",
        f"{LATE}{READ} Half of the blocks lost. Above SCAR: in points, paired. Odd: number of censored trials, and of "
        "negative ones.",
        lines,
        by=["program", "policy"],
        columns=[
            text("reduction", "saved", "%"),
            text("gap", "above SCAR", "points"),
            text("cost_text", "cost", "iterations"),
            text("odd", "odd", "trials"),
        ],
    )


def chosen_table(trials: TrialRows) -> Section:
    """Return the table of the policies chosen by rehearsal."""
    lines = []
    for program in trials.programs():
        policy = trials.chosen(program)
        if policy is None or (cell := trials.cell(program, policy)) is None:
            continue
        rehearsed, gap = trials.cell(program, policy, "rehearsal"), trials.gap(program, policy, SCAR)
        lines.append(
            row_of(program, policy, cell)
            | {
                "rehearsed": shown(rehearsed.reduction, rehearsed.ci) if rehearsed else None,
                "gap": shown(*gap) if gap else None,
            }
        )
    return table(
        "chosen",
        "One policy per program, chosen by rehearsal",
        f"{LATE}{READ} {CHOSEN}",
        lines,
        by=["program", "policy"],
        columns=[
            text("rehearsed", "in rehearsal", "%"),
            text("reduction", "on fresh seeds", "%"),
            text("gap", "above SCAR", "points"),
            number("trials", "number", "trials"),
        ],
    )


def several_table(trials: TrialRows) -> Section:
    """Return the table of runs with several failures."""
    lines = [
        row_of(program, policy, cell) | {"failures": failures}
        for failures in (2, 3)
        for program in trials.programs(f"several {failures}")
        for policy in trials.policies(program, f"several {failures}")
        if (cell := trials.cell(program, policy, f"several {failures}", late=False))
    ]
    return table(
        "several",
        "Several failures in one run",
        f"{READ} Each failure loses another random half of the blocks. Odd: number of censored trials, and of negative "
        "ones.",
        lines,
        by=["program", "failures", "policy"],
        columns=[
            text("reduction", "saved", "%"),
            text("cost_text", "cost", "iterations"),
            number("trials", "number", "trials"),
            text("odd", "odd", "trials"),
        ],
    )


def every_table(trials: TrialRows) -> Section:
    """Return the table of all cells."""
    lines = []
    for program in trials.programs():
        for policy in trials.policies(program):
            late, every = trials.cell(program, policy), trials.cell(program, policy, late=False)
            if late and every:
                lines.append(row_of(program, policy, late) | {"all": shown(every.reduction, every.ci)})
    return table(
        "every",
        "Every policy with every program",
        f"{READ} Restored to: root mean square distance from the lost state. Odd: number of censored trials, and of "
        "negative ones.",
        lines,
        by=["program", "policy"],
        columns=[
            text("reduction", "saved, T >= C", "%"),
            text("all", "saved, all", "%"),
            text("cost_text", "cost", "iterations"),
            number("error", "restored to", "distance"),
            text("bytes", "written", "bytes an iteration"),
            number("undefined", "resamples without a reduction", f"of {RESAMPLES:,}"),
            number("trials", "number", "trials"),
            text("odd", "odd", "trials"),
        ],
        folded=True,
    )
