"""Claims about exactness, checked against the rows of the study. There is no paper: the claims are Holdfast's own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from holdfast_lab.studies.base import MEASURED, Claim, Row, decided_by, statement
from holdfast_lab.studies.exact.cost import SHARES
from holdfast_lab.studies.exact.goodput import EVEN, FEWEST
from holdfast_lab.studies.exact.spread import EXACT, POLICIES, spreads
from holdfast_lab.studies.exact.workers.cost import CERTIFICATE, FOLD, ORDERED, TREE
from holdfast_lab.studies.stats import bootstrap, median

_OURS = "Holdfast, docs/papers/exact.md"

LARGEST_RATIO = 1.03
"""Limit for the upper end of an interval."""
IMBALANCE_PERCENT = 5.0
MEMORY_PERCENT = 5.0
_ROUNDS = 8
"""Minimum number of blocks for a verdict: an interval from fewer is too narrow."""
_RUNS = 3
"""Minimum number of runs of a job for an interval."""

_AT_MOST = (
    f"a step with deterministic all-reduce takes at most {LARGEST_RATIO} times as long as with unordered all-reduce"
)
ONE_SLICE = f"Without failures, one slice per worker: {_AT_MOST}"
MORE_SLICES = {
    order: f"Without failures, more slices than workers ({order} order): {_AT_MOST}" for order in (FOLD, TREE)
}
CERTIFIED = (
    f"Without failures, one slice per worker: with the certificate a step takes at most {LARGEST_RATIO} times as long "
    "as without"
)
WITHOUT = (
    f"One slice per worker: a step with deterministic all-reduce takes at most {LARGEST_RATIO} times as long as in a "
    "plain loop without fault tolerance that uses Open MPI's Allreduce"
)
FASTER = "One slice per worker: a step with deterministic all-reduce takes no longer than with DDP on Gloo"
MEMORY = (
    "Deterministic all-reduce takes at most one gradient per slice and one for the result, on the whole machine, "
    f"within {MEMORY_PERCENT:g} %"
)
GOODPUT = f"After a kill an even split commits at least as many samples per second as {FEWEST.name}"
IMBALANCE = (
    "After a kill, the slowdown of steps over evenly divided work is as predicted from the slices, within "
    f"{IMBALANCE_PERCENT:g} %"
)
ONE_POINT = {
    policy: f"All runs with failures under {policy} end with the sha256 of the failure-free run" for policy in EXACT
}
SPREAD = {
    policy: f"Runs with failures under {policy} differ: their accuracy has a standard deviation above 0"
    for policy in POLICIES
    if policy not in EXACT
}


def hold_claims(rows: Sequence[Row], seed: int) -> list[Claim]:
    """Return every claim with its result."""
    measured = [row for row in rows if row["status"] == MEASURED]
    cost = [row for row in measured if row["part"] == "cost"]
    jobs = [row for row in measured if row["part"] == "goodput"]
    trained = spreads(measured, seed)
    ratios = [
        _ratio(ONE_SLICE, _at(cost, FOLD, SHARES[:1]), "to_any"),
        *(_ratio(claim, _at(cost, order, SHARES[1:]), "to_any") for order, claim in MORE_SLICES.items()),
        _ratio(CERTIFIED, _at(cost, CERTIFICATE, SHARES[:1]), "to_fold"),
        _ratio(WITHOUT, _at(cost, FOLD, SHARES[:1]), "to_plain"),
        _ratio(FASTER, _at(cost, FOLD, SHARES[:1]), "to_ddp", most=1.0),
    ]
    memory = _memory([row for row in measured if row["part"] == "memory" and row["variant"] in ORDERED])
    ends = [
        *(
            _one_point(claim, [row for row in trained if row["policy"] == policy])
            for policy, claim in ONE_POINT.items()
        ),
        *(_spread(claim, [row for row in trained if row["policy"] == policy]) for policy, claim in SPREAD.items()),
    ]
    return [
        *decided_by(["cost"], ratios),
        *decided_by(["memory"], [memory]),
        *decided_by(["goodput"], [_goodput(jobs, seed), _imbalance(jobs, seed)]),
        *decided_by(["spread"], ends),
    ]


# -- cost and memory


def _at(rows: Sequence[Row], variant: str, shares: Sequence[int]) -> list[Row]:
    return [row for row in rows if row["variant"] == variant and row["share"] in shares]


def _ratio(words: str, rows: Sequence[Row], name: str, most: float = LARGEST_RATIO) -> Claim:
    """Return a claim that holds if all rows are below ``most``, and fails if one is above, by their intervals."""
    claim = statement(words, _OURS, most)
    if not rows:
        return claim
    worst = max(rows, key=lambda row: row[f"{name}_high"])
    below = sum(row[f"{name}_high"] <= most for row in rows)
    above = [row for row in rows if row[f"{name}_low"] > most]
    holds = True if below == len(rows) else False if above else None
    told = (
        f"the highest interval of {len(rows)}: {worst['network']}, {worst['workers']} workers, {worst['slices']} "
        f"slices. The interval is below {most:g} in {below} and above in {len(above)}; the median of all ratios is "
        f"{statistics.median(row[name] for row in rows):.3g}"
    )
    ci = (worst[f"{name}_low"], worst[f"{name}_high"])
    if worst["rounds"] < _ROUNDS:
        told, holds = f"{told}; undecided, because there are fewer than {_ROUNDS} blocks", None
    return claim.judged(worst[name], holds, told, ci=ci)


def _memory(rows: Sequence[Row]) -> Claim:
    if not rows:
        return statement(MEMORY, _OURS)
    off = {id(row): 100 * (row["bytes"] / row["expected_bytes"] - 1) for row in rows}
    worst = max(rows, key=lambda row: off[id(row)])
    told = (
        f"the largest excess of {len(rows)}: {worst['network']}, {worst['slices']} slices, {worst['variant']}; "
        "allocated bytes are exact, so there is no interval"
    )
    return statement(MEMORY, _OURS, 0).judged(off[id(worst)], off[id(worst)] <= MEMORY_PERCENT, told, unit="%")


# -- after a kill


def _by_name(jobs: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for job in jobs:
        found.setdefault(job["divided"], []).append(job)
    return found


def _goodput(jobs: Sequence[Row], seed: int) -> Claim:
    even, whole = ([job["samples_per_s"] for job in _by_name(jobs).get(one.name, [])] for one in (EVEN, FEWEST))
    claim = statement(GOODPUT, _OURS, 1)
    if not even or not whole:
        return claim
    ours = median(even) / median(whole)
    if min(len(even), len(whole)) < _RUNS:
        return claim.judged(ours, None, f"fewer than {_RUNS} runs of each")
    low, high = bootstrap([even, whole], lambda drawn: median(drawn[0]) / median(drawn[1]), seed)
    holds = True if low >= 1 else False if high < 1 else None
    told = f"ratio of medians of {len(even)} and {len(whole)} runs, from the kill to the end, recovery included"
    return claim.judged(ours, holds, told, ci=(low, high))


def imbalances(jobs: Sequence[Row], seed: int) -> list[Row]:
    """Return a row for each way to divide the work: medians over runs, with intervals if there are enough runs."""
    found: list[Row] = []
    for name, mine in _by_name(jobs).items():
        row: Row = {"divided": name, "runs": len(mine), "expected": mine[0]["expected"], "status": MEASURED}
        row |= {"alive": mine[0]["alive"], "recover_s": median([job["recover_s"] for job in mine])}
        for key in ("imbalance", "samples_per_s", "goodput"):
            values = [job[key] for job in mine]
            low = high = None
            if len(values) >= _RUNS:
                low, high = bootstrap([values], lambda drawn: median(drawn[0]), seed)
            row |= {key: median(values), f"{key}_low": low, f"{key}_high": high}
        found.append(row)
    return found


def _imbalance(jobs: Sequence[Row], seed: int) -> Claim:
    claim, ways = statement(IMBALANCE, _OURS, 0), imbalances(jobs, seed)
    if not ways:
        return claim
    off = {row["divided"]: 100 * (row["imbalance"] / row["expected"] - 1) for row in ways}
    worst = max(ways, key=lambda row: abs(off[row["divided"]]))
    ours = off[worst["divided"]]
    if any(row["runs"] < _RUNS for row in ways):
        return claim.judged(ours, None, f"fewer than {_RUNS} runs of each", unit="%")
    ends = {
        row["divided"]: [100 * (row[f"imbalance_{end}"] / row["expected"] - 1) for end in ("low", "high")]
        for row in ways
    }
    inside = [low >= -IMBALANCE_PERCENT and high <= IMBALANCE_PERCENT for low, high in ends.values()]
    outside = [low > IMBALANCE_PERCENT or high < -IMBALANCE_PERCENT for low, high in ends.values()]
    holds = True if all(inside) else False if any(outside) else None
    told = (
        f"the largest error of {len(ways)} ways to divide the work: {worst['divided']}, {worst['expected']:.3g} "
        f"expected, {worst['imbalance']:.3g} measured"
    )
    low, high = ends[worst["divided"]]
    return claim.judged(ours, holds, told, ci=(low, high), unit="%")


# -- spread of final results


def _one_point(words: str, rows: Sequence[Row]) -> Claim:
    claim = statement(words, _OURS, 100)
    if not rows:
        return claim
    same, runs = sum(row["same"] for row in rows), sum(row["runs"] for row in rows)
    told = f"{same} of {runs} runs; {'; '.join(row['training'] for row in rows)}"
    return claim.judged_by_count(same, runs, told)


def _spread(words: str, rows: Sequence[Row]) -> Claim:
    """Return a claim that holds if every training has a spread, and fails if one has none at all."""
    claim = statement(words, _OURS)
    if not rows:
        return claim
    least = min(rows, key=lambda row: row["accuracy_sd"])
    holds = True if least["accuracy_sd_low"] > 0 else False if least["accuracy_sd_high"] == 0 else None
    each = "; ".join(f"{row['training']}: {row['hashes']} different sha256 in {row['runs']} runs" for row in rows)
    told = f"standard deviation over runs, the smallest of {len(rows)}: {least['training']}. {each}"
    ci = (least["accuracy_sd_low"], least["accuracy_sd_high"])
    return claim.judged(least["accuracy_sd"], holds, told, ci=ci, unit="points")
