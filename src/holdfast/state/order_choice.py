"""Chooses the order in which gradients are added, as far as the settings leave it open, once for a job.

A tree lets hosts exchange sums instead of all terms, so with ``Settings.order`` ``auto`` a job that begins with workers on
several hosts uses it, and one on a single host adds one slice after another. If gradients are rounded on the wire, a unit
is as large as possible without belonging to two hosts at the beginning: then a host sends one rounded number for all of
its slices. The choice belongs to the job: checkpoints contain it, newcomers receive it with the state, and it stays when
the number of hosts changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.base.orders import UNITS, base_of, is_rounded, rounded_order
from holdfast.comm.memory import host_id
from holdfast.config import Settings
from holdfast.data.assignment import even_ranges
from holdfast.errors import ConfigError
from holdfast.setting_choices import AUTO, ORDERS
from holdfast.state.context import JobContext


def known_order(settings: Settings) -> str:
    """Return the order if the settings alone decide it, otherwise ""."""
    if settings.order == AUTO or (settings.wire == "bf16" and settings.order == "tree"):
        return ""
    return rounded_order("fold", 1) if settings.wire == "bf16" and settings.order == "fold" else settings.order


def choose_order(job: JobContext) -> str:
    """Return the order of this job, the same at all members, which all call this whenever they load a state.

    A failure may interrupt this at some members only, and those that are left may be on fewer hosts. So what any of them
    knows already counts, and the hosts only if none knows anything.

    Raises:
        ConfigError: if members were started with different orders, or the order of the job's state needs another wire.
    """
    order_index, is_one_host = ORDERS.index(job.loops.order or AUTO), True
    if len(job.comm.processes) > 1:
        order_index, is_one_host = _compare(job, order_index)
    settings = job.settings
    if order_index:
        _check_wire(job, ORDERS[order_index])
        return ORDERS[order_index]
    base = "fold" if settings.order == AUTO and is_one_host else "tree"
    return rounded_order(base, 1 if is_one_host else _unit(job)) if settings.rounds else base


def _compare(job: JobContext, mine: int) -> tuple[int, bool]:
    """Return the order that any member knows, as an index, and whether all members are on one host. A collective."""
    setting, rounds = ORDERS.index(job.settings.order), int(job.settings.rounds)
    host, absent = host_id(), -len(ORDERS)
    order_index, most, least, first, last, some, none = job.comm.maximum(
        (mine, setting or absent, -setting if setting else absent, host, ~host, rounds, -rounds)
    )
    if most > 0 and most != -least:
        raise ConfigError(
            f"workers were started with order {ORDERS[-least]} and with {ORDERS[most]}: give all the same --order"
        )
    if some != -none:
        raise ConfigError("workers were started with wire fp32 and with bf16: give all the same --wire")
    return order_index, first == ~last


def order_of_checkpoint(job: JobContext, theirs: str) -> str:
    """Return the order of the job whose state this one loads.

    Raises:
        ConfigError: if this job was given another one.
    """
    _check_wire(job, theirs)
    if job.settings.order not in (AUTO, theirs, base_of(theirs)):
        raise ConfigError(
            f"the checkpoint was made with order={theirs}, but this run has order={job.settings.order}: leave --order out"
        )
    return theirs


def _check_wire(job: JobContext, theirs: str) -> None:
    """Raise ``ConfigError`` unless an order rounds what this job's settings round."""
    if is_rounded(theirs) != job.settings.rounds:
        wire, advice = ("bf16", "give --wire bf16") if is_rounded(theirs) else ("fp32", _without_rounding(job.settings))
        raise ConfigError(f"the state is of a job with wire={wire} (order={theirs}): {advice}")


def _without_rounding(settings: Settings) -> str:
    """Return which options to leave out so that nothing is rounded."""
    order = [f"--order {settings.order}"] if is_rounded(settings.order) else []
    wire = ["--wire bf16"] if settings.wire == "bf16" else []
    return f"leave out {' and '.join(order + wire)}"


def _unit(job: JobContext) -> int:
    """Return the size of a unit for the hosts of the workers that begin. A collective."""
    processes = job.comm.processes
    hosts = torch.empty(len(processes), 1, dtype=torch.int64)
    job.comm.allgather(torch.tensor([host_id()]), hosts)
    host_of = {rank: int(host) for ranks, host in zip(processes, hosts, strict=True) for rank in ranks}
    beginning = job.first_members[: len(job.first_members) - job.settings.spares]
    return largest_unit([host_of[rank] for rank in beginning if rank in host_of], job.loops.slices)


def largest_unit(hosts: Sequence[int], slices: int) -> int:
    """Return the largest unit none of which belongs to two hosts, given the host of each worker, in slice order."""
    ranges = even_ranges(slices, len(hosts))
    host_of = [host for host, (start, stop) in zip(hosts, ranges, strict=True) for _ in range(start, stop)]
    return max(
        unit
        for unit in UNITS
        if unit == 1 or (unit <= slices and all(len({*host_of[n : n + unit]}) == 1 for n in range(0, slices, unit)))
    )
