"""Durations of a step and of regrouping by number of members, derived from costs, cluster and job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from holdfast_lab.simulate.checks import LONGEST_S, NS
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.costs import Costs
from holdfast_lab.simulate.job import SimulatedJob

Seconds = npt.NDArray[np.float64]
Ticks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """The simulator's durations by number of members. Arrays of shape ``(total + 1,)``, nanoseconds.

    Entry 0 equals that of one member.

    Args:
        compute: Computing of a step, before its first all-reduce.
        sums: All all-reduces of a step, at least 1.
        exposed: How long all wait for the optimizer in a step.
        regroup: From the detection of a failure by all survivors until all know each other's progress.
        weight: What a step counts, in shares of ``1/workers`` of a full step; not a duration.
    """

    compute: Ticks
    sums: Ticks
    exposed: Ticks
    regroup: Ticks
    weight: Ticks


def price_table(cluster: Cluster, job: SimulatedJob, costs: Costs) -> PriceTable:
    """Return the durations of a step and of regrouping, by number of members."""
    members, seats = _members(cluster)
    compute, sums = step_parts_s(cluster, job, costs)
    return PriceTable(
        compute=_ticks(compute),
        sums=np.maximum(_ticks(sums), 1),
        exposed=_ticks(exposed_s(cluster, job, costs)),
        regroup=_ticks(costs.regroup_s + costs.regroup_hop_s * np.log2(members)),
        weight=seats if job.batch == "local" else np.full_like(seats, cluster.workers),
    )


def step_parts_s(cluster: Cluster, job: SimulatedJob, costs: Costs) -> tuple[Seconds, Seconds]:
    """Return the durations of computing and of all-reduces in a step, by number of members.

    Returns:
        Two arrays of shape ``(total + 1,)``, seconds; entry 0 equals that of one member.
    """
    members, seats = _members(cluster)
    sums = costs.sum_s + costs.sum_hop_s * np.log2(members)
    sums = sums + 2 * (members - 1) / members * (costs.sum_bytes / costs.link_bytes_per_s)
    if costs.steps_s:
        known, seconds = zip(*costs.steps_s, strict=True)
        whole = np.interp(members, known, seconds)
        sums = np.minimum(sums, whole)
        return whole - sums, sums
    slowest = 1 + costs.straggle * _slowest(costs.straggle, seats)
    return costs.slice_s * _share(cluster, job, seats) * slowest, sums


def exposed_s(cluster: Cluster, job: SimulatedJob, costs: Costs) -> Seconds:
    """Return how long all wait for the optimizer in a step, by number of members.

    Without overlap, updates follow the commit vote. With the overlapped optimizer they run one after the other, each
    after its bucket's all-reduce, beside the all-reduces that follow. What remains when the last all-reduce is done
    delays the commit vote.

    Returns:
        An array of shape ``(total + 1,)``, seconds.
    """
    _, sums = step_parts_s(cluster, job, costs)
    if not job.overlap_optimizer:
        return np.full_like(sums, costs.update_s)
    one, each = (costs.update_s + costs.copy_s) / job.buckets, sums / (job.buckets + 1)
    return np.maximum(one, job.buckets * one - (job.buckets - 1) * each)


def _members(cluster: Cluster) -> tuple[Ticks, Ticks]:
    """Return all numbers of members, and the number of them that have slices of the mini-batch."""
    members = np.maximum(np.arange(cluster.total + 1), 1)
    return members, np.minimum(members, cluster.workers)


def _share(cluster: Cluster, job: SimulatedJob, seats: Ticks) -> Seconds:
    """Return the number of slices of the busiest worker."""
    slices = job.slices or cluster.workers
    if job.batch == "local":
        return np.full(seats.shape, slices / cluster.workers)
    if job.split == "even":
        return slices / seats
    return np.ceil(slices / seats)


def _slowest(straggle: float, seats: Ticks) -> Seconds:
    """Return the expected excess of the largest of ``seats`` normal numbers over the mean (Blom, 1958)."""
    if straggle == 0:
        return np.zeros(seats.shape)
    return np.array(_largest_normal(int(seats.max())))[seats]


@lru_cache(maxsize=4)
def _largest_normal(most: int) -> tuple[float, ...]:
    inverse = NormalDist().inv_cdf
    return (0.0, 0.0, *(inverse((m - 0.375) / (m + 0.25)) for m in range(2, most + 1)))


def _ticks(seconds: Seconds) -> Ticks:
    counted: Ticks = np.rint(np.minimum(seconds, LONGEST_S) * NS).astype(np.int64)
    return counted
