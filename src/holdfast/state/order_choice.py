"""Chooses the order in which gradients are added (``Settings.order`` is ``auto``), once for a job.

A tree lets hosts exchange sums instead of all terms, so a job that begins with workers on several hosts uses it, and one
on a single host adds one slice after another. The choice belongs to the job: checkpoints contain it, newcomers receive it
with the state, and it stays when the number of hosts changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.comm.memory import host_id
from holdfast.config import AUTO, ORDERS
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.engine.context import JobContext


def choose_order(job: JobContext) -> str:
    """Return the order of this job, the same at all members, which all call this whenever they load a state.

    A failure may interrupt this at some members only, and those that are left may be on fewer hosts. So what any of them
    knows already counts, and the hosts only if none knows anything.

    Raises:
        ConfigError: if members were started with different orders.
    """
    mine = ORDERS.index(job.loops.order or AUTO)
    given = ORDERS.index(job.settings.order)
    if len(job.comm.processes) == 1:
        return ORDERS[mine] if mine else "fold"
    host, absent = host_id(), -len(ORDERS)
    known, most, least, first, last = job.comm.maximum(
        (mine, given or absent, -given if given else absent, host, ~host)
    )
    if most > 0 and most != -least:
        raise ConfigError(
            f"workers were started with order {ORDERS[-least]} and with {ORDERS[most]}: give all the same --order"
        )
    return ORDERS[known] if known else "fold" if first == ~last else "tree"


def order_of_checkpoint(job: JobContext, theirs: str) -> str:
    """Return the order of the job whose state this one loads.

    Raises:
        ConfigError: if this job was given another one.
    """
    if job.settings.order not in (AUTO, theirs):
        raise ConfigError(
            f"the checkpoint was made with order={theirs}, but this run has order={job.settings.order}: leave --order out"
        )
    return theirs
