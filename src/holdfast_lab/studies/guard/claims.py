"""Requirements on the guard, checked against the rows of its study."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Claim, Row, decided_by, in_percent, statement
from holdfast_lab.studies.guard.cells import CLEAN, CLEAN_NETWORKS, CRITICAL_PART, KINDS, LONGER, QUICK
from holdfast_lab.studies.guard.cost import LARGE
from holdfast_lab.studies.guard.setup import ACTIVATIONS, GRADIENTS, MESSAGE, OF_ONE_REPLICA, WEIGHTS
from holdfast_lab.studies.stats import wilson

_ASKED = "requirement on the guard"

HEALED_PERCENT = 99.9
CLEAN_STEPS = 100_000
MOST_RATIO = 1.03
LONGEST = 64
"""Maximum number of steps of a check rotation."""

FOUND_AND_HEALED = "Harmful single bit flips in the weights of one replica are detected and healed"
OF_THE_STATE = "Harmful single bit flips in the optimizer state of one replica are detected and healed"
WITHIN = "Harmful bit flips in one replica are detected within a check rotation"
NO_ALARMS = "No false alarms in 100,000 clean steps"
COST = (
    "A step with --guard heal takes at most 1.03 times as long as without the guard, by the upper end of the interval "
    "(8.4 million parameters)"
)


def hold_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim with its result."""
    kinds = [row for row in rows if row["part"] == "kind" and row["status"] == MEASURED]
    flips = [
        _healed(FOUND_AND_HEALED, kinds, WEIGHTS),
        _healed(OF_THE_STATE, kinds, OF_ONE_REPLICA[1]),
        *[_found(kinds, target) for target in (GRADIENTS, ACTIVATIONS, MESSAGE)],
        _found(kinds, MESSAGE, sums=True),
        _within(kinds),
    ]
    cost = [row for row in rows if row["part"] == "cost" and row["status"] == MEASURED]
    return [
        *decided_by(["cell", QUICK, KINDS, CRITICAL_PART, LONGER], flips),
        *decided_by(["cell", CLEAN, CLEAN_NETWORKS], [_alarms([row for row in rows if row["part"] == "clean"])]),
        *decided_by(["cost"], [_cost(cost)]),
    ]


def _of(kinds: Sequence[Row], *targets: str) -> list[Row]:
    return [row for row in kinds if row["target"] in targets]


def _healed(words: str, kinds: Sequence[Row], target: str) -> Claim:
    """Return the claim of at least 99.9 %: it holds if the lower end of the interval reaches that."""
    mine = _of(kinds, target)
    tries, healed, found = (sum(row[name] for row in mine) for name in ("harmful", "healed", "found"))
    if not tries:
        return statement(words, _ASKED)
    ours, ci = in_percent(healed, tries)
    holds = True if ci[0] >= HEALED_PERCENT else False if ours < HEALED_PERCENT else None
    told = f"{healed} of {tries} runs ended bit-identical to the fault-free run, {found} flips were detected"
    return statement(words, _ASKED, HEALED_PERCENT).judged(ours, holds, told, ci=ci, unit="%")


def _found(kinds: Sequence[Row], target: str, *, sums: bool = False) -> Claim:
    """Return a claim without a required number: only range checks can detect a wrong sum that all replicas get."""
    words = (
        f"Every injected harmful bit flip in {target}{', with --guard-sums,' if sums else ''} is detected and healed"
    )
    mine = [row for row in _of(kinds, target) if row["sums"] == sums]
    tries, healed, found = (sum(row[name] for row in mine) for name in ("harmful", "healed", "found"))
    claim = statement(words, "no required number")
    if not tries:
        return claim
    told = f"{healed} of {tries} runs ended bit-identical to the fault-free run, {found} flips were detected"
    return claim.judged_by_count(healed, tries, told)


def _within(kinds: Sequence[Row]) -> Claim:
    mine = [row for row in _of(kinds, *OF_ONE_REPLICA) if row.get("within_all") is not None]
    claim = statement(WITHIN, "docs/how-to/what-the-guard-checks.md", LONGEST)
    if not mine:
        return claim
    ours = max(row["within_all"] for row in mine)
    found = sum(row["found"] for row in mine)
    told = f"until the last of {found} flips was detected; 1: in the step of the flip"
    return claim.judged(ours, ours <= LONGEST, told, unit="steps")


def _alarms(rows: Sequence[Row]) -> Claim:
    steps, alarms = (sum(row[name] for row in rows) for name in ("steps", "alarms"))
    claim = statement(NO_ALARMS, _ASKED, 0)
    if not steps:
        return claim
    most = 1e5 * wilson(alarms, steps)[1]
    least = 1e5 * wilson(alarms, steps)[0]
    told = f"{steps:,} steps in {sum(row['runs'] for row in rows)} training runs"
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
    told = f"median of {row['blocks']} rounds; the load of the machine is listed under settings"
    holds = ci[1] <= MOST_RATIO
    ours, unit = row["ratio"], "times as long"
    return claim.judged(ours, holds, told, ci=ci, unit=unit)
