"""What recovery needs of MPI: the protocol without one of its calls, tried in every run of a small job.

The explorer drives the protocol that real workers run, over an engine that promises what ULFM promises: a call that
fails at some may succeed at others, a revoke wakes all, an agreement is the same at all who return from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.recovery import Forward, Protocol, Restart, Rollback, Strategy
from holdfast_lab.studies.base import MEASURED, Row

NEEDS_CHECKOUT = "What breaks without each call of MPI: the model checker that tries it is not installed with Holdfast; run this from a checkout of the repository."


@dataclass(frozen=True, slots=True)
class Checker:
    """The model checker of the recovery protocol.

    Args:
        explore: Tries every run of a strategy in a world.
        world: Where it is tried.
        broken: Has the protocols that lack something, by their names.
    """

    explore: Callable[..., Any]
    world: Callable[..., Any]
    broken: ModuleType


def model_checker() -> Checker | None:
    """Return the model checker, None where there is no checkout of the repository.

    It belongs to the tests and is not installed: it is looked for as a package in ``tests/`` of the checkout that this file is in.
    """
    tests = next((path / "tests" for path in Path(__file__).parents if (path / "tests" / "model").is_dir()), None)
    if tests is None:
        return None
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
    try:
        from model import broken
        from model.explorer import World, explore
    except ModuleNotFoundError:
        return None
    return Checker(explore, World, broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """A call left out, and where that is tried.

    Args:
        call: Of MPI.
        purpose: What it is for.
        instead: What happens in its place.
        protocol: The name of the protocol that does so, beside the model checker; "" for the real one.
        workers: Of the smallest job in which it can go wrong.
        deaths: How many die at most; none: who has left looks dead.
        uniform: Whether agreements are the same at all who return from them.
        in_place: Whether a sum that fails spoils its input.
        strategies: For which it is tried; empty: for all of :data:`STRATEGIES`.
    """

    call: str
    purpose: str
    instead: str
    protocol: str = ""
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
        protocol="WithoutRevoke",
    ),
    Omission(
        call="MPI_Comm_agree, the first",
        purpose="nobody shrinks before all have heard",
        instead="shrink right after the revoke",
        protocol="WithoutHearing",
    ),
    Omission(
        call="MPI_Comm_shrink",
        purpose="a communicator without the dead",
        instead="go on with the one there is",
        protocol="WithoutShrink",
    ),
    Omission(
        call="MPI_Comm_agree, the second",
        purpose="nobody uses the new communicator before all have it",
        instead="use it at once",
        protocol="WithoutFence",
        workers=4,
        deaths=2,
    ),
    Omission(
        call="MPI_Comm_agree, the third",
        purpose="all decide on the same knowledge",
        instead="decide as soon as one knows",
        protocol="WithoutConfirming",
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
        protocol="WithoutGate",
        workers=2,
        deaths=0,
    ),
    Omission(
        call="MPI_Comm_agree, at the end",
        purpose="nobody leaves while others may have to recover",
        instead="leave after a barrier",
        protocol="BarrierForGate",
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
    """Try a call left out with each strategy; a row for each, with what goes wrong, "" if nothing does.

    Without the model checker there are no rows.
    """
    checker = model_checker()
    if checker is None:
        return []
    protocol: type[Protocol] = getattr(checker.broken, omission.protocol) if omission.protocol else Protocol
    rows = []
    for name, strategy in STRATEGIES.items():
        world = checker.world(
            workers=omission.workers,
            deaths=omission.deaths,
            lossy=name == "forward",
            uniform=omission.uniform,
            in_place=omission.in_place,
            make_protocol=protocol,
        )
        found = checker.explore(strategy, world)
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
