"""The policies that are compared: what is saved while nothing happens, and what is restored when nodes die.

All write the same bytes per iteration, on the average, as one full save every C iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.priority_choice import CHOICES
from holdfast_lab.workloads.iterative.base import Program, State

NODES = 4
"""So many hold equal shares of the blocks, drawn at random."""
HALF = NODES // 2
FRACTIONS = (1 / 2, 1 / 4, 1 / 8)
LEAST = FRACTIONS[-1]
"""The fraction of SCAR's headline."""

TRADITIONAL = "traditional"
PARTIAL = "partial"
SCAR = f"{PARTIAL}, priority, r = 1/8"
NO_CHECKPOINT = "reset, no checkpoint"
RESEED = "nothing lost, other randomness"
HINDSIGHT = "hindsight: knows when"
HINDSIGHT_WHO = "hindsight: knows when and who"
LINE = "dead reckoning"
INT8 = "int8"
LINE_INT8 = "dead reckoning, int8"
CALIBRATED = "calibrated dead reckoning"
CALIBRATED_INT8 = "calibrated dead reckoning, int8"
FULL_INT8 = "partial, int8 full saves"
LIVE = "live factor only"
LIVE_INT8 = "live factor only, int8"
SURVIVORS = "solved from survivors, no checkpoint"
SWEEP = "SCAR, then a sweep over the lost documents"
LIKELIHOOD = "SCAR, priority by log-likelihood"
LIKELIHOOD_SWEEP = "priority by log-likelihood, then a sweep"
ALONE = "parameters only, optimizer state reset"
RESET = "SCAR, optimizer state reset"
KEPT = "SCAR, optimizer state kept by a peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is saved, and what is restored.

    Args:
        name: In rows and on the page.
        fraction: r: of the blocks, how many a save takes; 1: all, every C iterations.
        choice: Which; see :class:`~holdfast.checkpoint.priority.Saving`.
        predictor: What a block is restored to; see there.
        codec: How it is written; see there.
        saves: ``all`` rows, the ``parameters`` alone, those of ``live`` blocks, or ``nothing``.
        distance: By which blocks are chosen: the program's own, or its ``likelihood``.
        restore: Name of the way back, one of :data:`~holdfast_lab.studies.scar.restore.WAYS`.
        nodes: How many of :data:`NODES` die; 0: none.
    """

    name: str
    fraction: float = 1.0
    choice: str = "priority"
    predictor: str = "last"
    codec: str = "exact"
    saves: str = "all"
    distance: str = "own"
    restore: str = "lost"
    nodes: int = HALF

    @property
    def saving(self) -> tuple[float, str, str, str, str, str]:
        """Return what decides about the checkpoint: policies that agree in it share one."""
        return (self.fraction, self.choice, self.predictor, self.codec, self.saves, self.distance)


def chosen(restore: str, choice: str, fraction: float) -> str:
    """Return the name of a policy of partial saves.

    Args:
        restore: ``full`` if all go back, :data:`PARTIAL` if only the lost do.
        choice: Which blocks are saved.
        fraction: r, one over a whole number.
    """
    return f"{restore}, {choice}, r = 1/{round(1 / fraction)}"


def paper_policies(fractions: Sequence[float] = FRACTIONS) -> list[Policy]:
    """Return the policies of the paper, the traditional one first; ``fractions`` are those of partial saves."""
    partial = [
        Policy(name=PARTIAL if nodes == HALF else f"{PARTIAL}, {nodes}/{NODES} lost", nodes=nodes)
        for nodes in range(1, NODES)
    ]
    by_choice = [
        Policy(name=chosen(restore, choice, fraction), fraction=fraction, choice=choice, restore=way)
        for restore, way in (("full", "all"), (PARTIAL, "lost"))
        for choice in CHOICES
        for fraction in fractions
    ]
    others = [
        Policy(name=f"{SCAR}, {nodes}/{NODES} lost", fraction=LEAST, nodes=nodes)
        for nodes in range(1, NODES)
        if nodes != HALF
    ]
    return [traditional(), *partial, *by_choice, *others]


def traditional() -> Policy:
    """Return the full save every C iterations to which all go back."""
    return Policy(name=TRADITIONAL, restore="all")


def scar() -> Policy:
    """Return the paper's combination: priority, r = 1/8, partial recovery."""
    return Policy(name=SCAR, fraction=LEAST)


def controls() -> list[Policy]:
    """Return what tells how much of a policy's gain is its own: no checkpoint at all, and no loss at all."""
    return [
        Policy(name=NO_CHECKPOINT, saves="nothing", restore="start"),
        Policy(name=RESEED, saves="nothing", restore="reseed", nodes=0),
    ]


def bounds() -> list[Policy]:
    """Return the policies that know at every save what is to come."""
    return [
        Policy(name=HINDSIGHT, fraction=LEAST, saves="nothing", restore="hindsight"),
        Policy(name=HINDSIGHT_WHO, fraction=LEAST, saves="nothing", restore="hindsight who"),
    ]


def further_policies(program: Program, state: State) -> list[Policy]:
    """Return what goes beyond the paper and makes sense for a program.

    Args:
        program: Any.
        state: Of it.
    """
    rows = program.rows(state)
    found: list[Policy] = []
    if rows[0].is_floating_point():
        found += [
            Policy(name=LINE, fraction=LEAST, predictor="line"),
            Policy(name=INT8, fraction=LEAST, codec="int8"),
            Policy(name=LINE_INT8, fraction=LEAST, predictor="line", codec="int8"),
            Policy(name=CALIBRATED, fraction=LEAST, predictor="line", restore="calibrated"),
            Policy(name=CALIBRATED_INT8, fraction=LEAST, predictor="line", codec="int8", restore="calibrated"),
            Policy(name=FULL_INT8, codec="int8"),
        ]
    if len(rows) > 1:
        found += [
            Policy(name=ALONE, fraction=LEAST, saves="parameters", restore="lost, rest reset"),
            Policy(name=RESET, fraction=LEAST, restore="lost, rest reset"),
            Policy(name=KEPT, fraction=LEAST, restore="lost, rest kept"),
        ]
    if program.live is not None:
        found.append(Policy(name=LIVE, fraction=LEAST, saves="live", restore="live"))
        found.append(Policy(name=LIVE_INT8, fraction=LEAST, codec="int8", saves="live", restore="live"))
    if hasattr(program, "resolve"):
        found.append(Policy(name=SURVIVORS, saves="nothing", restore="survivors"))
    if hasattr(program, "resample"):
        found.append(Policy(name=SWEEP, fraction=LEAST, restore="sweep"))
    if hasattr(program, "log_likelihoods"):
        found.append(Policy(name=LIKELIHOOD, fraction=LEAST, distance="likelihood"))
        found.append(Policy(name=LIKELIHOOD_SWEEP, fraction=LEAST, distance="likelihood", restore="sweep"))
    return found


def candidates(policies: Sequence[Policy]) -> list[Policy]:
    """Return those that a system may choose from: what needs no foresight, no peer, and no luck.

    Args:
        policies: Of a program.
    """
    of_numbers = {LINE, INT8, LINE_INT8, CALIBRATED, CALIBRATED_INT8, FULL_INT8, ALONE}
    names = {SCAR, LIVE, LIVE_INT8, SURVIVORS, SWEEP, LIKELIHOOD, LIKELIHOOD_SWEEP} | of_numbers
    return [policy for policy in policies if policy.name in names]
