"""Claims and page sections about perturbations: their iteration cost by size and kind, compared with its bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast_lab.studies.base import MEASURED, SHARE, Claim, Row, statement
from holdfast_lab.studies.scar.figures import unbroken
from holdfast_lab.studies.scar.perturbation_each import ALWAYS, NOTHING
from holdfast_lab.studies.scar.perturbation_rows import KNOWN
from holdfast_lab.studies.sections import Section, number, points, table, text
from holdfast_lab.studies.stats import share_interval

_DERIVED = "derived"
_PAPER = "theorem"
_VIOLATIONS = "violations"
_MANY = 20_000
_HEAVY = "quadratic"
"""The program shown in the plot of costs: its c is known."""


def bound_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims about the bound, in the form that always holds and in the paper's form."""
    known = [row for row in rows if row["part"] == "bound" and row["status"] == MEASURED and row["c_from"] == KNOWN]
    kinds = [row for row in rows if row["part"] == "kind" and row["status"] == MEASURED]
    return [_always_holds(known), _of_every_kind(kinds), _as_a_difference(known), _irreducible(kinds)]


def _always_holds(known: Sequence[Row]) -> Claim:
    words = "A perturbed run reaches eps after at most log((||x(0) - x*|| + D) / eps) / log(1/c) iterations"
    claim = statement(words, _DERIVED, 0.0)
    if not known:
        return claim
    tries, above = (sum(row[name] for row in known) for name in ("perturbations", "violations"))
    found = f"in {tries:,} perturbations, random, adversarial, resets, and along the slowest direction; c is known"
    found += "" if tries >= _MANY else f"; fewer than the planned {_MANY:,}"
    return claim.judged(float(above), above == 0, found, unit=_VIOLATIONS)


def _of_every_kind(kinds: Sequence[Row]) -> Claim:
    words = (
        "The same bound holds for every kind of perturbation: resets, bit flips, lost gradients, stale blocks, "
        "rounding, asynchronous updates; once, several times, at every step"
    )
    known = [row for row in kinds if row["c_from"] == KNOWN]
    claim = statement(words, _DERIVED, 0.0)
    if not known:
        return claim
    above, runs, lost = (sum(row[name] for row in known) for name in ("violations", "trials", "diverged"))
    found = f"in {runs} runs of {len({row['kind'] for row in known})} kinds where c is known"
    found += f"; {lost} of them diverged to NaN or infinity, where there is no bound" if lost else ""
    if fitted := [row for row in kinds if row["c_from"] != KNOWN]:
        worse, tries = (sum(row[name] for row in fitted) for name in ("violations", "trials"))
        found += f"; with a fitted c, {worse} in {tries}"
    return claim.judged(float(above), above == 0, found, unit=_VIOLATIONS)


def _as_a_difference(known: Sequence[Row]) -> Claim:
    words = "The iteration cost is at most log(1 + D / ||x(0) - x*||) / log(1/c)"
    claim = statement(words, _PAPER, 0.0)
    if not known:
        return claim
    tries, above = (sum(row[name] for row in known) for name in ("perturbations", "difference_violations"))
    each = "; ".join(f"{row['program']}, {row['kind']}: {100 * row['difference_share']:.0f} %" for row in known)
    found = (
        f"of {tries:,} perturbations cost more, because the unperturbed run is faster than the rate c at first; {each}"
    )
    ci = _interval(above, tries)
    ours = above / tries
    return claim.judged(ours, above == 0, found, ci=ci, unit=SHARE)


def _interval(successes: int, tries: int) -> tuple[float, float] | None:
    # Exact binomial sums take too long for many tries; the normal approximation is good enough there.
    if tries <= 1000:
        return share_interval(successes, tries)
    share = successes / tries
    half = 1.96 * (share * (1 - share) / tries) ** 0.5
    return max(0.0, share - half), min(1.0, share + half)


def _irreducible(kinds: Sequence[Row]) -> Claim:
    words = "Perturbed at every step by at most s, a run stays within c / (1 - c) s of the optimum"
    always = [row for row in kinds if row["often"] == ALWAYS]
    checked = [row for row in always if row["holds"] is not None]
    known = [row for row in checked if row["c_from"] == KNOWN]
    claim = statement(words, _PAPER, 1.0)
    if not known:
        return claim
    kept = sum(row["holds"] for row in known)
    others = [row for row in checked if row["c_from"] != KNOWN]
    found = f"of {len(known)} kinds of perturbations where c is known"
    found += f"; with a fitted c, {sum(row['holds'] for row in others)} of {len(others)}" if others else ""
    found += f", and {', '.join(slower)} exceeds it even without perturbation" if (slower := _slower(always)) else ""
    ci = share_interval(kept, len(known))
    ours, holds = kept / len(known), kept == len(known)
    return claim.judged(ours, holds, found, ci=ci, unit=SHARE)


def bound_sections(rows: Sequence[Row]) -> list[Section]:
    """Return the page sections about perturbations."""
    kinds = [row for row in rows if row["part"] == "kind" and row["status"] == MEASURED]
    return [_figure(rows), _bound_table(rows), _kinds_table(kinds), _always_table(kinds)]


def _figure(rows: Sequence[Row]) -> Section:
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
    return points(
        "perturbations",
        "Iteration cost by size of the perturbation",
        "A quadratic of 64 dimensions and condition number 30, whose c is known. D is the sum of c^-l ||d(l)||, as a "
        "multiple of ||x(0) - x*||; means over runs of similar D, with 95 % intervals. The paper's bound limits the "
        "cost; the absolute bound limits the iteration count, and is shown minus the unperturbed count.",
        shown,
        series=["kind"],
        interval=["low", "high"],
        x=["delta", "D, as a multiple of ||x(0) - x*||"],
        y=["cost", "iteration cost, iterations"],
        log=["x"],
        curves=curves if binned else [],
    )


def _bound_table(rows: Sequence[Row]) -> Section:
    counts = ("violations", "difference_violations", "censored")
    held = [
        row | {name: unbroken(f"{row[name]:,} of {row['perturbations']:,}") for name in counts}
        for row in rows
        if row["part"] == "bound" and row["status"] == MEASURED
    ]
    return table(
        "bound",
        "How often the bounds were exceeded",
        "Absolute: the iteration count of the perturbed run against its bound. As a difference: the cost against the "
        "paper's bound. If the absolute bound is exceeded: with a known c, the theory or this code is wrong; with a "
        "fitted c, the program did not contract at that rate everywhere on the run's path; with the worst ratio of the "
        "unperturbed run as c, the perturbed run had an iteration with a worse ratio.",
        held,
        by=["program", "kind", "c_from"],
        columns=[
            number("c", "c", "a factor an iteration"),
            text("violations", "absolute bound exceeded", "perturbations"),
            text("difference_violations", "as a difference", "perturbations"),
            number("difference_excess", "by at most", "iterations"),
            text("censored", "censored", "perturbations"),
        ],
    )


def _kinds_table(kinds: Sequence[Row]) -> Section:
    return table(
        "kinds",
        "Every kind of perturbation, once and several times",
        f"{_about(kinds)} In each trial all kinds perturb the same iterations. Size: the sum of ||d||, median over the "
        "trials.",
        [_shown(row) for row in kinds if row["often"] != ALWAYS],
        by=["program", "kind", "often"],
        columns=[
            text("size", "size", _START),
            _COST,
            _BOUND,
            text("violations", "exceeded", "runs"),
            text("loss_cost", "cost in loss", "iterations"),
            _ODD,
        ],
    )


def _always_table(kinds: Sequence[Row]) -> Section:
    always = [row for row in kinds if row["often"] == ALWAYS]
    slower = _slower(always)
    above, runs = (sum(row[name] for row in always) for name in ("violations", "trials"))
    return table(
        "irreducible",
        "Perturbation at every step: the irreducible error",
        f"{_about(kinds)} Size: the largest ||d|| of the second half of a run. Error: the largest distance to x* in "
        "its last quarter; its bound: c / (1 - c) times the size. Left: the part of the distance that has not decayed "
        f"yet; it is added to the bound before the comparison. The bound on the cost was exceeded in {above} of {runs} "
        f"runs. {_of_nothing(slower)}",
        [_shown(row) | {"holds": _kept(row, slower)} for row in always],
        by=["program", "kind"],
        columns=[
            text("size", "size", _START),
            text("error", "error", _START),
            text("error_bound", "its bound", _START),
            text("left", "left", _START),
            text("holds", "within bound"),
            _COST,
            _BOUND,
            _ODD,
        ],
    )


_COST, _BOUND = ["cost", "cost", "text", "iterations"], ["bound", "bound", "text", "iterations"]
_ODD = ["odd", "odd", "text", "runs"]
_START = "starts"
"""The unit of distances: ||x(0) - x*||."""


def _slower(always: Sequence[Row]) -> dict[str, Row]:
    """Return the programs whose unperturbed run is slower than their c at its end, with its row."""
    return {row["program"]: row for row in always if row["kind"] == NOTHING and row["holds"] is False}


def _of_nothing(slower: Mapping[str, Row]) -> str:
    """Return the explanation of the unperturbed run's row, and of programs where it exceeds its bound."""
    words = "Nothing: the unperturbed run, whose bound is only the part that is left."
    if not slower:
        return words
    each = ", ".join(f"{name}: error {row['error']:.2g}, left {row['left']:.2g}" for name, row in slower.items())
    return (
        f"{words} A fitted c is the rate over the whole run. A run that is fast at first and slow at its end therefore "
        f"exceeds the bound there even without perturbation ({each}). For such a program the other rows say little "
        "about the theory: they are in brackets."
    )


def _kept(row: Row, slower: Mapping[str, Row]) -> str:
    if row["holds"] is None:
        return "-"
    word = "yes" if row["holds"] else "no"
    return f"({word})" if row["program"] in slower else word


def _about(kinds: Sequence[Row]) -> str:
    """Return the note common to all tables of kinds."""
    rates = {row["program"]: f"{row['program']} {row['c']:.4g} ({row['c_from']})" for row in kinds}
    return (
        "Distances are multiples of the initial distance ||x(0) - x*||. Cost: extra iterations to the same distances "
        "from x*, mean with its 95 % interval; bound: the largest cost that the absolute bound allows. A run that "
        "never reaches a distance counts as if it did so when it was stopped, so the mean is a lower bound (>=). Odd: "
        "number of runs that never reached it, and how many of them ended at NaN or infinity, where there is no bound "
        f"(-). c: {', '.join(rates.values())}."
    )


def _shown(row: Row) -> Row:
    """Return a row of the tables of kinds, with numbers as text so that a 0 is displayed."""
    least, least_in_loss = (">= " if row[name] else "" for name in ("censored", "loss_censored"))
    between = f" [{_tenths(row['ci'][0])}, {_tenths(row['ci'][1])}]" if row["ci"] else ""
    texts = {
        "cost": f"{least}{_tenths(row['cost'])}{between}",
        "bound": "-" if row["bound"] is None else _tenths(row["bound"]),
        "violations": f"{row['violations']} of {row['trials']}",
        "loss_cost": f"{least_in_loss}{_tenths(row['loss_cost'])}",
        "odd": f"{row['censored']}, {row['diverged']}",
    }
    distances = {
        name: "-" if (value := row.get(name)) is None else f"{value:.2g}"
        for name in ("size", "error", "error_bound", "left")
    }
    return {**row, **distances, **{name: unbroken(text) for name, text in texts.items()}}


def _tenths(value: float) -> str:
    """Return a number of iterations with one decimal."""
    return f"{round(value, 1) + 0.0:,.1f}"  # 0.0, not -0.0
