"""Claims about policies beyond the paper, checked against the rows."""

from __future__ import annotations

from holdfast_lab.studies.base import Claim, statement
from holdfast_lab.studies.scar.policies import LINE_INT8, LIVE, NO_CHECKPOINT, SCAR
from holdfast_lab.studies.scar.programs import ITEMS_FIRST
from holdfast_lab.studies.scar.rows import ALS, MLR, NETWORKS, ScarCell, TrialRows
from holdfast_lab.studies.scar.verdicts import EXPECTED, POINTS, at_least, gaps, is_above, reductions, told

_GOAL = "our goal"


def further_claims(trials: TrialRows) -> list[Claim]:
    """Return the claims about policies that are not in the paper."""
    return [*_beyond(trials), *_chosen(trials)]


def _beyond(trials: TrialRows) -> list[Claim]:
    mlr, best = trials.stated(MLR), trials.at_best(MLR)
    words = f"{LINE_INT8[0].upper()}{LINE_INT8[1:]} saves at least {{:.0f}} %: logistic regression at the {{}} rate"
    return [
        at_least(words.format(95, "stated"), EXPECTED, 95.0, reductions(trials, mlr, LINE_INT8)),
        at_least(words.format(75, "best"), EXPECTED, 75.0, reductions(trials, best, LINE_INT8)),
        at_least(
            "Dead reckoning with int8 is 15 points above SCAR: networks at the stated rates",
            EXPECTED,
            15.0,
            gaps(trials, trials.stated(NETWORKS), LINE_INT8, SCAR),
            POINTS,
        ),
        *_of_als(trials),
        _above_control(trials),
    ]


def _of_als(trials: TrialRows) -> list[Claim]:
    """Return the claims about saving only the factor that the next iteration reads; which one decides the gain."""
    words = "ALS: a checkpoint of only the live factor saves at least 95 % ({} updated first, so the {} are live)"
    programs = trials.stated(ALS)
    swapped = [program for program in programs if program.endswith(ITEMS_FIRST)]
    usual = [program for program in programs if program not in swapped]
    return [
        at_least(words.format("items", "users"), EXPECTED, 95.0, reductions(trials, swapped, LIVE)),
        at_least(words.format("users", "items"), EXPECTED, 95.0, reductions(trials, usual, LIVE)),
    ]


def _above_control(trials: TrialRows) -> Claim:
    words = "SCAR saves more than no checkpoint with lost blocks reset to their initial values"
    return is_above(words, gaps(trials, trials.stated(), SCAR, NO_CHECKPOINT))


def _chosen(trials: TrialRows) -> list[Claim]:
    """Return the claims about a policy chosen by rehearsal, evaluated on fresh seeds."""
    picked = {program: policy for program in trials.programs() if (policy := trials.chosen(program))}
    words = (
        "One policy per program, chosen by rehearsing failures next to a failure-free run, is never below SCAR on "
        "fresh seeds"
    )
    above_scar = {
        f"{program} ({picked[program]})": gap
        for program in picked
        for gap in gaps(trials, [program], picked[program], SCAR).values()
    }
    never = at_least(words, _GOAL, 0.0, above_scar, POINTS)
    words = "The policy chosen by rehearsal saves more than 90 % for most programs at their stated rates"
    cells: dict[str, ScarCell] = {
        f"{program} ({picked[program]})": cell
        for program in trials.stated()
        if program in picked and (cell := trials.cell(program, picked[program]))
    }
    if not cells:
        return [never, statement(words, _GOAL, 50.0, "%")]
    above = [name for name, cell in cells.items() if cell.reduction > 0.9]
    share = 100 * len(above) / len(cells)
    found = f"of {len(cells)} programs; {told({name: (cell.reduction, cell.ci) for name, cell in cells.items()})}"
    claim = statement(words, _GOAL, 50.0).judged(share, share > 50, found, unit="%")
    return [never, claim]
