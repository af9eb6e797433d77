"""Cost against the size of a perturbation, and its bounds: what the rows of perturbations are held against, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.study.base import MEASURED, Claim, Row
from holdfast.study.perturbation_rows import KNOWN
from holdfast.study.stats import share_interval

_DERIVED = "derived"
_PAPER = "theorem"
_NOT_CHECKED = "not checked: nothing was run that tells"
_MANY = 20_000
_HEAVY = "quadratic"
"""The program whose costs are drawn: its c is known."""


def bound_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return what was found of the bound, in the form that always holds and in the paper's."""
    known = [row for row in rows if row["part"] == "bound" and row["status"] == MEASURED and row["c_from"] == KNOWN]
    standing = [row for row in rows if row["part"] == "irreducible" and row["status"] == MEASURED]
    return [_always_holds(known), _as_a_difference(known), _irreducible(standing)]


def _always_holds(known: Sequence[Row]) -> Claim:
    words = "A perturbed run is at eps after at most log((||x(0) - x*|| + D) / eps) / log(1/c) iterations"
    if not known:
        return Claim(claim=words, source=_DERIVED, paper=0.0, found=_NOT_CHECKED)
    tries, above = (sum(row[name] for row in known) for name in ("perturbations", "violations"))
    found = f"violations in {tries:,} perturbations, random, adversarial, resets, and along the slowest direction; c is known"
    found += "" if tries >= _MANY else f"; fewer than {_MANY:,} were asked for"
    return Claim(claim=words, source=_DERIVED, paper=0.0, ours=float(above), holds=above == 0, found=found)


def _as_a_difference(known: Sequence[Row]) -> Claim:
    words = "The iteration cost is at most log(1 + D / ||x(0) - x*||) / log(1/c)"
    if not known:
        return Claim(claim=words, source=_PAPER, paper=0.0, found=_NOT_CHECKED)
    tries, above = (sum(row[name] for row in known) for name in ("perturbations", "difference_violations"))
    each = "; ".join(f"{row['program']}, {row['kind']}: {row['difference_share']:.0%}" for row in known)
    found = f"share of {tries:,} perturbations that cost more: the undisturbed run beats the rate c at first; {each}"
    ci = _interval(above, tries)
    return Claim(claim=words, source=_PAPER, paper=0.0, ours=above / tries, ci=ci, holds=above == 0, found=found)


def _interval(successes: int, tries: int) -> tuple[float, float] | None:
    # Exact binomial sums take too long for many tries, and are not needed there.
    if tries <= 1000:
        return share_interval(successes, tries)
    share = successes / tries
    half = 1.96 * (share * (1 - share) / tries) ** 0.5
    return max(0.0, share - half), min(1.0, share + half)


def _irreducible(standing: Sequence[Row]) -> Claim:
    words = "Perturbed at every step by at most s, a run stays within c / (1 - c) s of the optimum"
    checked = [row for row in standing if row["holds"] is not None]
    known = [row for row in checked if row["c_from"] == KNOWN]
    if not known:
        return Claim(claim=words, source=_PAPER, paper=1.0, found=_NOT_CHECKED)
    kept = sum(row["holds"] for row in known)
    others = [row for row in checked if row["c_from"] != KNOWN]
    found = f"share of {len(known)} kinds of perturbations where c is known"
    found += f"; where c was fitted, {sum(row['holds'] for row in others)} of {len(others)}" if others else ""
    ci = share_interval(kept, len(known))
    return Claim(
        claim=words, source=_PAPER, paper=1.0, ours=kept / len(known), ci=ci, holds=kept == len(known), found=found
    )


def bound_sections(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the sections about perturbations."""
    return [_figure(rows), _bound_table(), _standing_table()]


def _figure(rows: Sequence[Row]) -> dict[str, Any]:
    binned = [row for row in rows if row["part"] == "perturbation" and row["program"] == _HEAVY]
    shown = [
        row | {"low": (row["ci"] or [row["cost"]] * 2)[0], "high": (row["ci"] or [row["cost"]] * 2)[1]}
        for row in binned
    ]
    ordered = sorted(binned, key=lambda row: row["delta"])
    deltas = [row["delta"] for row in ordered]
    curves = [
        ["paper's bound", deltas, [row["paper_bound"] for row in ordered]],
        ["absolute bound", deltas, [row["absolute_bound"] for row in ordered]],
    ]
    return {
        "kind": "points",
        "id": "perturbations",
        "title": "Iteration cost against the size of a perturbation",
        "note": "A quadratic of 64 dimensions and condition 30, whose c is known. D is the sum of c^-l ||d(l)||, as a multiple of ||x(0) - x*||; "
        "means of runs of about the same D, with 95 % intervals. The paper's bound is on the cost; the absolute one is on the count, less "
        "the undisturbed count.",
        "where": {},
        "rows": shown,
        "series": ["kind"],
        "interval": ["low", "high"],
        "x": ["delta", "D / ||x(0) - x*||"],
        "y": ["cost", "iterations"],
        "log": ["x"],
        "curves": curves if binned else [],
    }


def _bound_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "bound",
        "title": "How often the bounds were exceeded",
        "note": "Absolute: the count of the perturbed run against its bound. As a difference: the cost against the paper's bound.",
        "where": {"part": "bound", "status": MEASURED},
        "by": ["program", "kind", "c_from"],
        "columns": [
            ["perturbations", "perturbations", "number"],
            ["c", "c", "number"],
            ["violations", "absolute bound exceeded", "number"],
            ["difference_violations", "as a difference", "number"],
            ["difference_share", "share", "%"],
            ["difference_excess", "by at most, iterations", "number"],
            ["censored", "censored", "number"],
            ["means", "what that means", "text"],
        ],
    }


def _standing_table() -> dict[str, Any]:
    return {
        "kind": "table",
        "id": "irreducible",
        "title": "Perturbed at every step: the error that stays",
        "note": "Distances are multiples of ||x(0) - x*||. The error is the largest of the last quarter of the run; the bound is c / (1 - c) times "
        "the largest perturbation.",
        "where": {"part": "irreducible", "status": MEASURED},
        "by": ["program", "kind", "c_from"],
        "columns": [
            ["size", "perturbation", "number"],
            ["error", "error", "number"],
            ["bound", "bound", "number"],
            ["holds", "below it", "truth"],
            ["final_loss", "loss at the end", "number"],
        ],
    }
