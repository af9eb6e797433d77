"""What recovery needs of MPI: the protocol without one of its calls, tried in every run of a small job.

The explorer drives the protocol that real workers run, over an engine that promises what ULFM promises: a call that
fails at some may succeed at others, a revoke wakes all, an agreement is the same at all who return from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.recovery import Forward, Protocol, Restart, Rollback, Strategy
from holdfast_lab.studies.base import MEASURED, Row
from model.broken import (
    BarrierForGate,
    WithoutConfirming,
    WithoutFence,
    WithoutGate,
    WithoutHearing,
    WithoutRevoke,
    WithoutShrink,
)
from model.explorer import World, explore


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """A call left out, and where that is tried.

    Args:
        call: Of MPI.
        purpose: What it is for.
        instead: What happens in its place.
        protocol: That does so.
        workers: Of the smallest job in which it can go wrong.
        deaths: How many die at most; none: who has left looks dead.
        uniform: Whether agreements are the same at all who return from them.
        in_place: Whether a sum that fails spoils its input.
        strategies: For which it is tried; empty: for all of :data:`STRATEGIES`.
    """

    call: str
    purpose: str
    instead: str
    protocol: type[Protocol] = Protocol
    workers: int = 3
    deaths: int = 1
    uniform: bool = True
    in_place: bool = False
    strategies: tuple[str, ...] = ()


STRATEGIES: dict[str, Strategy] = {"rollback": Rollback(), "forward": Forward(), "restart": Restart()}

OMISSIONS = (
    Omission(
        call="MPI_Comm_revoke",
        purpose="wakes who waits in a sum for the dead",
        instead="each finds out by itself",
        protocol=WithoutRevoke,
    ),
    Omission(
        call="MPI_Comm_agree, the first",
        purpose="nobody shrinks before all have heard",
        instead="shrink right after the revoke",
        protocol=WithoutHearing,
    ),
    Omission(
        call="MPI_Comm_shrink",
        purpose="a communicator without the dead",
        instead="go on with the one there is",
        protocol=WithoutShrink,
    ),
    Omission(
        call="MPI_Comm_agree, the second",
        purpose="nobody uses the new communicator before all have it",
        instead="use it at once",
        protocol=WithoutFence,
        workers=4,
        deaths=2,
    ),
    Omission(
        call="MPI_Comm_agree, the third",
        purpose="all decide on the same knowledge",
        instead="decide as soon as one knows",
        protocol=WithoutConfirming,
        workers=4,
        deaths=2,
    ),
    Omission(
        call="MPI_Comm_agree, uniform",
        purpose="the same result at all, also if somebody dies meanwhile",
        instead="an agreement that may fail at some",
        uniform=False,
    ),
    Omission(
        call="MPI_Comm_agree, at the end",
        purpose="nobody leaves while others may have to recover",
        instead="leave after the last step",
        protocol=WithoutGate,
        workers=2,
        deaths=0,
    ),
    Omission(
        call="MPI_Comm_agree, at the end",
        purpose="nobody leaves while others may have to recover",
        instead="leave after a barrier",
        protocol=BarrierForGate,
        workers=2,
        deaths=0,
    ),
    Omission(
        call="MPI_Allreduce out of place",
        purpose="a failed sum leaves its input as it was",
        instead="sum in place, as the code of 2017 does",
        workers=2,
        in_place=True,
    ),
)


def need_rows(omission: Omission) -> list[Row]:
    """Try a call left out with each strategy; a row for each, with what goes wrong, "" if nothing does."""
    rows = []
    for name, strategy in STRATEGIES.items():
        world = World(
            workers=omission.workers,
            deaths=omission.deaths,
            lossy=name == "forward",
            uniform=omission.uniform,
            in_place=omission.in_place,
            make_protocol=omission.protocol,
        )
        found = explore(strategy, world)
        rows.append(
            {
                "part": "needs",
                "status": MEASURED,
                "call": omission.call,
                "purpose": omission.purpose,
                "instead": omission.instead,
                "strategy": name,
                "workers": omission.workers,
                "deaths": omission.deaths,
                "breaks": found.violation is not None,
                "breaks_under": name if found.violation else None,
                "how": _in_words(found.violation) if found.violation else None,
                "violation": found.violation,
                "moves": len(found.trace) - 1 if found.violation else None,
                "states": found.states,
            }
        )
    return rows


def _in_words(violation: str) -> str:
    """Return what went wrong up to where the explorer names orders and states."""
    words = re.split(r"[\[({<]", violation, maxsplit=1)[0].rstrip()
    if words == violation or words.endswith(":"):
        return words.rstrip(":")
    return words.rpartition(":")[0]  # the last sentence was cut in the middle
