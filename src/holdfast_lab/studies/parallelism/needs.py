"""What recovery needs of MPI: the protocol with one MPI call left out, tried in every run of a small job.

The explorer drives the protocol of real workers over an engine that makes the promises of ULFM: a call that fails at
some ranks may succeed at others, a revoke interrupts all ranks, and an agreement has the same result at every rank that
returns.
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

NEEDS_CHECKOUT = "What breaks without each MPI call: the model checker is not installed with Holdfast; run this from a checkout of the repository."


@dataclass(frozen=True, slots=True)
class ModelChecker:
    """The model checker of the recovery protocol.

    Args:
        explore: Tries every run of a strategy in a world.
        world: The simulated job.
        broken: The incomplete protocols, by name.
    """

    explore: Callable[..., Any]
    world: Callable[..., Any]
    broken: ModuleType


def model_checker() -> ModelChecker | None:
    """Return the model checker; None without a checkout of the repository.

    It belongs to the tests and is not installed. It is looked up as a package in ``tests/`` of the checkout that this
    file is in.
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
    return ModelChecker(explore, World, broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Omission:
    """A call left out, and the job in which that is tried.

    Args:
        call: The MPI call.
        purpose: What the call is for.
        instead: What happens in its place.
        protocol: The name of the incomplete protocol in the model checker; "" for the real one.
        workers: Size of the smallest job in which it can go wrong.
        deaths: Largest number of failed ranks; 0: a rank that has left looks failed.
        uniform: Whether an agreement has the same result at every rank that returns.
        in_place: Whether a failed all-reduce spoils its input.
        strategies: Strategies to try; empty: all of :data:`STRATEGIES`.
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
        purpose="interrupts ranks that wait in an all-reduce for a failed rank",
        instead="each rank detects the failure on its own",
        protocol="WithoutRevoke",
    ),
    Omission(
        call="MPI_Comm_agree, the first",
        purpose="no rank shrinks before all know of the failure",
        instead="shrink right after the revoke",
        protocol="WithoutHearing",
    ),
    Omission(
        call="MPI_Comm_shrink",
        purpose="a communicator without the failed ranks",
        instead="keep using the old one",
        protocol="WithoutShrink",
    ),
    Omission(
        call="MPI_Comm_agree, the second",
        purpose="no rank uses the new communicator before all have it",
        instead="use it immediately",
        protocol="WithoutFence",
        workers=4,
        deaths=2,
    ),
    Omission(
        call="MPI_Comm_agree, the third",
        purpose="all ranks decide on the same knowledge",
        instead="decide as soon as one rank knows",
        protocol="WithoutConfirming",
        workers=4,
        deaths=2,
    ),
    Omission(
        call="MPI_Comm_agree, uniform",
        purpose="the same result at all ranks, even if one fails during the call",
        instead="an agreement that may fail at some ranks",
        uniform=False,
    ),
    Omission(
        call="MPI_Comm_agree, at the end",
        purpose="no rank leaves while others may have to recover",
        instead="leave after the last step",
        protocol="WithoutGate",
        workers=2,
        deaths=0,
    ),
    Omission(
        call="MPI_Comm_agree, at the end",
        purpose="no rank leaves while others may have to recover",
        instead="leave after a barrier",
        protocol="BarrierForGate",
        workers=2,
        deaths=0,
    ),
    Omission(
        call="MPI_Allreduce out of place",
        purpose="a failed all-reduce leaves its input unchanged",
        instead="all-reduce in place, as the code of 2017 does",
        workers=2,
        in_place=True,
    ),
)


def need_rows(omission: Omission) -> list[Row]:
    """Try leaving out a call under each strategy; return a row for each, with what goes wrong, or "" if nothing does.

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
    """Return the description of a violation up to where the explorer lists orders and states."""
    words = re.split(r"[\[({<]", violation, maxsplit=1)[0].rstrip()
    if words == violation or words.endswith(":"):
        return words.rstrip(":")
    return words.rpartition(":")[0]  # the last sentence was cut off
