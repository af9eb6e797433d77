"""Claims of the paper about partial recovery and priority checkpoints, and our own, checked against the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast_lab.studies.base import MEASURED, SHARE, Claim, Row, decided_by, statement
from holdfast_lab.studies.scar.bound import bound_claims
from holdfast_lab.studies.scar.claims_further import further_claims
from holdfast_lab.studies.scar.policies import FRACTIONS, HINDSIGHT, NODES, PARTIAL, SCAR, TRADITIONAL, chosen
from holdfast_lab.studies.scar.rows import ALS, LDA, MLR, NETWORKS, TrialRows
from holdfast_lab.studies.scar.verdicts import (
    ABSTRACT,
    DERIVED,
    EXPECTED,
    LEAST,
    MOST,
    PAPER,
    POINTS,
    at_least,
    gaps,
    in_percent,
    is_above,
    partial_of,
    reductions,
    show,
    told,
    where_it_lies,
)

_NEAR_POINTS = 10.0
_NEAR_SHARE = 0.02
_SHUFFLES = 10_000


def skews_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return the skew of the drift of each program, as measured by its pilot run."""
    return {row["program"]: row["skew"] for row in rows if row["part"] == "pilot" and row["status"] == MEASURED}


_OF_TRIALS = ("rates", "pilot", "main", "late")
"""Kinds of tasks that claims about single failures take their numbers from."""


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with its result."""
    trials, skews = TrialRows(rows, seed), skews_of(rows)
    of_trials = [
        *_headline(trials, skews),
        _near_optimal(trials),
        *_expected_of_scar(trials),
        _predicted(trials, skews, seed),
        *[_partial_alone(trials, nodes) for nodes in range(1, NODES)],
        _never_farther(trials),
        *[_share_of_square(trials, rows, nodes) for nodes in range(1, NODES)],
        *_order_of_choices(trials),
        _smaller_fraction(trials),
    ]
    return [
        *decided_by(_OF_TRIALS, of_trials),
        *decided_by(["pilot", "2 failures", "3 failures"], [_several(trials)]),
        *decided_by(_OF_TRIALS, [_same_bytes(trials, rows)]),
        *decided_by(["perturbations", "kinds of perturbations"], bound_claims(rows)),
        *decided_by([*_OF_TRIALS, "rehearsal"], further_claims(trials)),
    ]


def _headline(trials: TrialRows, skews: Mapping[str, float]) -> list[Claim]:
    words = (
        f"SCAR (r = 1/8, half of the blocks lost) costs {LEAST:.0f} to {MOST:.0f} % fewer iterations than rollback to "
        "a full checkpoint"
    )
    claims = []
    for program in trials.stated():
        late = trials.cell(program, SCAR)
        if late is None or not math.isfinite(late.reduction):
            continue
        ours = 100 * late.reduction
        found = f"{where_it_lies(ours)}; failures after the first full save, {late.trials} trials"
        if every := trials.cell(program, SCAR, late=False):
            found += f"; all failures: {show(every.reduction, every.ci, '%')}"
        if program in skews:
            found += f"; the top eighth of the blocks has {100 * skews[program]:.0f} % of the drift"
        holds = ours >= LEAST if not in_percent(late.ci)[0] < LEAST < in_percent(late.ci)[1] else None
        found += "" if holds is not None else "; undecided by the interval"
        claims.append(
            statement(f"{words}: {program}", ABSTRACT, LEAST).judged(
                ours, holds, found, ci=in_percent(late.ci), unit="%"
            )
        )
    return claims or [statement(words, ABSTRACT, LEAST, "%")]


def _near_optimal(trials: TrialRows) -> Claim:
    words = (
        "SCAR is near-optimal: the best choice of blocks at the same bytes would save at most "
        f"{_NEAR_POINTS:.0f} points more"
    )
    source = f"{ABSTRACT}; the {_NEAR_POINTS:.0f} points are ours"
    found = gaps(trials, trials.stated(), HINDSIGHT, SCAR)
    claim = statement(words, source, _NEAR_POINTS, POINTS)
    if not found:
        return claim
    farthest = max(found, key=lambda name: found[name][0])
    value, ci = found[farthest]
    return claim.judged(
        100 * value,
        100 * value <= _NEAR_POINTS,
        f"hindsight, which knows when nodes fail but not which, minus SCAR; the largest gap: {farthest}; "
        f"{told(found, POINTS)}",
        ci=in_percent(ci),
    )


def _expected_of_scar(trials: TrialRows) -> list[Claim]:
    sparse = [program for program in trials.stated(MLR) if program in ("mlr-covertype", "mlr-reuters")]
    dense = [program for program in trials.stated(MLR, NETWORKS) if program not in sparse]
    words = "SCAR saves at least {:.0f} % of the iterations: {}"
    groups = (
        (78.0, "sparse or categorical inputs", sparse),
        (55.0, "dense images and networks", dense),
        (50.0, "ALS and LDA, after the first full save", trials.stated(ALS, LDA)),
    )
    return [
        at_least(words.format(least, name), EXPECTED, least, reductions(trials, programs, SCAR))
        for least, name, programs in groups
    ]


def _predicted(trials: TrialRows, skews: Mapping[str, float], seed: int) -> Claim:
    words = "The skew of the drift of a failure-free run predicts the iterations that SCAR saves"
    saved = {
        program: reduction
        for program, (reduction, _) in reductions(trials, trials.stated(), SCAR).items()
        if program in skews
    }
    if len(saved) < 3:
        return statement(words, EXPECTED)
    both = np.array([list(saved.values()), [skews[name] for name in saved]])
    ranks = both.argsort(axis=1).argsort(axis=1)
    ranks = (ranks - ranks.mean()) / ranks[0].std()
    ours, rng = float((ranks[0] * ranks[1]).mean()), np.random.default_rng(seed)
    shuffled = rng.permuted(np.tile(ranks[1], (_SHUFFLES, 1)), axis=1)
    chance = float(((shuffled * ranks[0]).mean(axis=1) >= ours - 1e-9).mean())
    found = f"rank correlation over {len(saved)} programs; by chance it would be at least as high with p = {chance:.2g}"
    holds = False if ours <= 0 else True if chance < 0.05 else None
    return statement(words, EXPECTED, 1.0).judged(ours, holds, found)


def _partial_alone(trials: TrialRows, nodes: int) -> Claim:
    expected = 100 * (1 - nodes / NODES)
    words = f"Partial recovery alone saves about 1 - p of the iterations: logistic regression, {nodes}/{NODES} lost"
    found = reductions(trials, trials.stated(MLR), partial_of(nodes))
    claim = statement(words, EXPECTED, expected, "%")
    if not found:
        return claim
    farthest = max(found, key=lambda name: abs(100 * found[name][0] - expected))
    value, ci = found[farthest]
    return claim.judged(
        100 * value,
        abs(100 * value - expected) <= _NEAR_POINTS,
        f"the largest deviation: {farthest}; the limit is {_NEAR_POINTS:.0f} points; {told(found)}",
        ci=in_percent(ci),
    )


def _never_farther(trials: TrialRows) -> Claim:
    words = (
        "Partial recovery is never farther from the lost state than rollback to the same checkpoint: ||d'|| <= ||d||"
    )
    pairs = [
        pair
        for nodes in range(1, NODES)
        for program in trials.programs()
        for pair in trials.pairs(program, partial_of(nodes), TRADITIONAL)
    ]
    claim = statement(words, PAPER, 1.0)
    if not pairs:
        return claim
    kept = [mine["error"] <= base["error"] * (1 + 1e-6) for mine, base in pairs]
    return claim.judged(float(np.mean(kept)), all(kept), f"of {len(kept)} failures", unit=SHARE)


def _share_of_square(trials: TrialRows, rows: Sequence[Row], nodes: int) -> Claim:
    expected = nodes / NODES
    blocks = {row["program"]: row["blocks"] for row in rows if row["part"] == "pilot" and row["status"] == MEASURED}
    # A program with only a few layers cannot lose exactly this share of its blocks.
    divided = [
        program
        for program in trials.programs()
        if abs(blocks.get(program, NODES) * nodes // NODES / blocks.get(program, NODES) - expected) <= _NEAR_SHARE
    ]
    words = f"If a random {nodes}/{NODES} of the blocks is lost, E||d'||^2 = p ||d||^2"
    claim = statement(words, PAPER, expected)
    if (shares := trials.share_of_error(partial_of(nodes), divided)) is None:
        return claim
    value, ci, every = shares
    holds = ci[0] <= expected <= ci[1] or abs(value - expected) <= _NEAR_SHARE
    found = f"mean over {len(every)} failures of {len(divided)} programs"
    unit = "of ||d||^2"
    return claim.judged(value, holds, found, ci=ci, unit=unit)


def _order_of_choices(trials: TrialRows) -> list[Claim]:
    return [
        is_above(
            f"With partial recovery, {better} saves more than {worse}, for every r below 1",
            {
                f"{program}, r = 1/{round(1 / fraction)}": gap
                for fraction in FRACTIONS
                for program, gap in gaps(
                    trials, trials.stated(), chosen(PARTIAL, better, fraction), chosen(PARTIAL, worse, fraction)
                ).items()
            },
        )
        for better, worse in (("priority", "round-robin"), ("round-robin", "random"))
    ]


def _smaller_fraction(trials: TrialRows) -> Claim:
    words = (
        "Saving smaller parts more often is better if the farthest blocks are saved first: r = 1/8 above r = 1/2, "
        "full recovery"
    )
    return is_above(
        words,
        gaps(
            trials, trials.stated(), chosen("full", "priority", FRACTIONS[-1]), chosen("full", "priority", FRACTIONS[0])
        ),
    )


def _several(trials: TrialRows) -> Claim:
    words = "With two and with three failures in one run, SCAR still saves most of the iterations"
    cells = {
        f"{program}, {failures} failures": cell
        for failures in (2, 3)
        for program in trials.programs(f"several {failures}")
        if (cell := trials.cell(program, SCAR, f"several {failures}", late=False))
    }
    return at_least(words, DERIVED, 50.0, {name: (cell.reduction, cell.ci) for name, cell in cells.items()})


def _same_bytes(trials: TrialRows, rows: Sequence[Row]) -> Claim:
    words = "No policy writes more bytes per iteration than one full save every C iterations"
    budgets = {
        row["program"]: row["block_bytes"] / row["every"]
        for row in rows
        if row["part"] == "pilot" and row["status"] == MEASURED
    }
    ratios = {
        f"{policy}, {program}": cell.bytes / budgets[program]
        for program in trials.programs()
        for policy in trials.policies(program)
        if program in budgets and (cell := trials.cell(program, policy))
    }
    claim = statement(words, PAPER, 1.0)
    if not ratios:
        return claim
    most = max(ratios, key=lambda name: ratios[name])
    return claim.judged(
        ratios[most],
        ratios[most] <= 1 + 1e-6,
        f"the largest: {most}; mean over failures after the first full save",
        unit="times the bytes of the full saves",
    )
