"""What is asked of the guard, held against the rows."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Claim, Row, in_percent, statement
from holdfast_lab.studies.guard.cost import LARGE
from holdfast_lab.studies.guard.setup import ACTIVATIONS, GRADIENTS, MESSAGE, OF_ONE_REPLICA, WEIGHTS
from holdfast_lab.studies.stats import wilson

_ASKED = "what is asked of the guard"

HEALED_PERCENT = 99.9
CLEAN_STEPS = 100_000
MOST_RATIO = 1.03
LONGEST = 64
"""Steps of a rotation, at most."""

FOUND_AND_HEALED = "Harmful single flips in weights of one replica are found and healed"
OF_THE_STATE = "Harmful single flips in the optimizer's state of one replica are found and healed"
WITHIN = "Harmful flips of one replica are found within a rotation"
NO_ALARMS = "No false alarms in 100,000 clean steps"
COST = "A step with --guard heal takes at most 1.03 times as long, upper end of the interval (8.4 million parameters)"


def hold_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim with what was found."""
    kinds = [row for row in rows if row["part"] == "kind" and row["status"] == MEASURED]
    return [
        _healed(FOUND_AND_HEALED, kinds, WEIGHTS),
        _healed(OF_THE_STATE, kinds, OF_ONE_REPLICA[1]),
        *[_found(kinds, target) for target in (GRADIENTS, ACTIVATIONS, MESSAGE)],
        _found(kinds, MESSAGE, sums=True),
        _within(kinds),
        _alarms([row for row in rows if row["part"] == "clean"]),
        _cost([row for row in rows if row["part"] == "cost" and row["status"] == MEASURED]),
    ]


def _of(kinds: Sequence[Row], *targets: str) -> list[Row]:
    return [row for row in kinds if row["target"] in targets]


def _healed(words: str, kinds: Sequence[Row], target: str) -> Claim:
    """At least 99.9 %: as many as that must have been tried without a miss for the interval to say so."""
    mine = _of(kinds, target)
    tries, healed, found = (sum(row[name] for row in mine) for name in ("harmful", "healed", "found"))
    if not tries:
        return statement(words, _ASKED)
    ours, ci = in_percent(healed, tries)
    holds = True if ci[0] >= HEALED_PERCENT else False if ours < HEALED_PERCENT else None
    told = f"{healed} of {tries} ended with the bits of the undisturbed run, {found} were found"
    return statement(words, _ASKED, HEALED_PERCENT).judged(ours, holds, told, ci=ci, unit="%")


def _found(kinds: Sequence[Row], target: str, *, sums: bool = False) -> Claim:
    """No number is asked of these: all replicas get the same wrong sum, which only ranges can tell."""
    words = (
        f"Every harmful flip of {target}{', with --guard-sums,' if sums else ''} that was tried was found and healed"
    )
    mine = [row for row in _of(kinds, target) if row["sums"] == sums]
    tries, healed, found = (sum(row[name] for row in mine) for name in ("harmful", "healed", "found"))
    claim = statement(words, "no number is asked")
    if not tries:
        return claim
    told = f"{healed} of {tries} ended with the bits of the undisturbed run, {found} were found"
    return claim.judged_by_count(healed, tries, told)


def _within(kinds: Sequence[Row]) -> Claim:
    mine = [row for row in _of(kinds, *OF_ONE_REPLICA) if row.get("within_all") is not None]
    claim = statement(WITHIN, "docs/how-to/what-the-guard-checks.md", LONGEST)
    if not mine:
        return claim
    ours = max(row["within_all"] for row in mine)
    found = sum(row["found"] for row in mine)
    told = f"until the last of {found} was found; 1: in the step that it struck in"
    return claim.judged(ours, ours <= LONGEST, told, unit="steps")


def _alarms(rows: Sequence[Row]) -> Claim:
    steps, alarms = (sum(row[name] for row in rows) for name in ("steps", "alarms"))
    claim = statement(NO_ALARMS, _ASKED, 0)
    if not steps:
        return claim
    most = 1e5 * wilson(alarms, steps)[1]
    least = 1e5 * wilson(alarms, steps)[0]
    told = f"of {steps:,} in {sum(row['runs'] for row in rows)} trainings"
    holds = False if alarms else True if steps >= CLEAN_STEPS else None
    ours, unit = 1e5 * alarms / steps, "in 100,000 steps"
    return claim.judged(ours, holds, told, ci=(least, most), unit=unit)


def _cost(rows: Sequence[Row]) -> Claim:
    mine = [row for row in rows if row["training"] == LARGE.name and row["guard"] == "heal"]
    claim = statement(COST, _ASKED, MOST_RATIO)
    if not mine:
        return claim
    (row,) = mine
    ci: tuple[float, float] = (row["ratio_low"], row["ratio_high"])
    told = f"median of {row['blocks']} rounds; the settings say how busy the machine was"
    holds = ci[1] <= MOST_RATIO
    ours, unit = row["ratio"], "times as long"
    return claim.judged(ours, holds, told, ci=ci, unit=unit)
