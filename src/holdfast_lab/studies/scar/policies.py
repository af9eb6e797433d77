"""The compared policies: which blocks are saved during training, and how lost blocks are restored after nodes fail.

On average, each policy writes the same bytes per iteration as one full save every C iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.priority_choice import CHOICES
from holdfast_lab.workloads.iterative.base import Program, State

NODES = 4
"""Number of nodes; each holds an equal, random share of the blocks."""
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
class ScarPolicy:
    """A policy for saving and restoring blocks.

    Args:
        name: Its name in rows and on the page.
        fraction: r, the fraction of the blocks in each save; 1: all blocks, every C iterations.
        choice: How blocks are chosen; see :class:`~holdfast.checkpoint.priority.PriorityPolicy`.
        predictor: The value a block is restored to; see there.
        codec: The encoding of saved blocks; see there.
        saves: ``all`` rows, only the ``parameters``, only rows of ``live`` blocks, or ``nothing``.
        distance: The metric for choosing blocks: the program's ``own``, or its ``likelihood``.
        restore: Name of the restore method, one of :data:`~holdfast_lab.studies.scar.restore.WAYS`.
        nodes: Number of :data:`NODES` that fail; 0: none.
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
        """Return the settings of the checkpoint; policies with the same settings share a checkpoint."""
        return (self.fraction, self.choice, self.predictor, self.codec, self.saves, self.distance)


def chosen(restore: str, choice: str, fraction: float) -> str:
    """Return the name of a policy with partial saves.

    Args:
        restore: ``full`` if all blocks are restored, :data:`PARTIAL` if only lost blocks are.
        choice: How blocks are chosen.
        fraction: r, the reciprocal of a whole number.
    """
    return f"{restore}, {choice}, r = 1/{round(1 / fraction)}"


def paper_policies(fractions: Sequence[float] = FRACTIONS) -> list[ScarPolicy]:
    """Return the policies of the paper, the traditional one first; ``fractions`` are the r of partial saves."""
    partial = [
        ScarPolicy(name=PARTIAL if nodes == HALF else f"{PARTIAL}, {nodes}/{NODES} lost", nodes=nodes)
        for nodes in range(1, NODES)
    ]
    by_choice = [
        ScarPolicy(name=chosen(restore, choice, fraction), fraction=fraction, choice=choice, restore=way)
        for restore, way in (("full", "all"), (PARTIAL, "lost"))
        for choice in CHOICES
        for fraction in fractions
    ]
    others = [
        ScarPolicy(name=f"{SCAR}, {nodes}/{NODES} lost", fraction=LEAST, nodes=nodes)
        for nodes in range(1, NODES)
        if nodes != HALF
    ]
    return [traditional(), *partial, *by_choice, *others]


def traditional() -> ScarPolicy:
    """Return the policy with a full save every C iterations and rollback of all blocks."""
    return ScarPolicy(name=TRADITIONAL, restore="all")


def scar() -> ScarPolicy:
    """Return the paper's combination: priority, r = 1/8, partial recovery."""
    return ScarPolicy(name=SCAR, fraction=LEAST)


def controls() -> list[ScarPolicy]:
    """Return the controls: no checkpoint at all, and no loss at all."""
    return [
        ScarPolicy(name=NO_CHECKPOINT, saves="nothing", restore="start"),
        ScarPolicy(name=RESEED, saves="nothing", restore="reseed", nodes=0),
    ]


def bounds() -> list[ScarPolicy]:
    """Return the policies with hindsight, which know at every save when nodes will fail."""
    return [
        ScarPolicy(name=HINDSIGHT, fraction=LEAST, saves="nothing", restore="hindsight"),
        ScarPolicy(name=HINDSIGHT_WHO, fraction=LEAST, saves="nothing", restore="hindsight who"),
    ]


def further_policies(program: Program, state: State) -> list[ScarPolicy]:
    """Return the policies beyond the paper that apply to a program.

    Args:
        program: The program.
        state: A state of the program.
    """
    rows = program.rows(state)
    found: list[ScarPolicy] = []
    if rows[0].is_floating_point():
        found += [
            ScarPolicy(name=LINE, fraction=LEAST, predictor="line"),
            ScarPolicy(name=INT8, fraction=LEAST, codec="int8"),
            ScarPolicy(name=LINE_INT8, fraction=LEAST, predictor="line", codec="int8"),
            ScarPolicy(name=CALIBRATED, fraction=LEAST, predictor="line", restore="calibrated"),
            ScarPolicy(name=CALIBRATED_INT8, fraction=LEAST, predictor="line", codec="int8", restore="calibrated"),
            ScarPolicy(name=FULL_INT8, codec="int8"),
        ]
    if len(rows) > 1:
        found += [
            ScarPolicy(name=ALONE, fraction=LEAST, saves="parameters", restore="lost, rest reset"),
            ScarPolicy(name=RESET, fraction=LEAST, restore="lost, rest reset"),
            ScarPolicy(name=KEPT, fraction=LEAST, restore="lost, rest kept"),
        ]
    if program.live is not None:
        found.append(ScarPolicy(name=LIVE, fraction=LEAST, saves="live", restore="live"))
        found.append(ScarPolicy(name=LIVE_INT8, fraction=LEAST, codec="int8", saves="live", restore="live"))
    if hasattr(program, "resolve"):
        found.append(ScarPolicy(name=SURVIVORS, saves="nothing", restore="survivors"))
    if hasattr(program, "resample"):
        found.append(ScarPolicy(name=SWEEP, fraction=LEAST, restore="sweep"))
    if hasattr(program, "log_likelihoods"):
        found.append(ScarPolicy(name=LIKELIHOOD, fraction=LEAST, distance="likelihood"))
        found.append(ScarPolicy(name=LIKELIHOOD_SWEEP, fraction=LEAST, distance="likelihood", restore="sweep"))
    return found


def candidates(policies: Sequence[ScarPolicy]) -> list[ScarPolicy]:
    """Return the policies that a real system could use: without hindsight, peer copies or controls.

    Args:
        policies: All policies of a program.
    """
    of_numbers = {LINE, INT8, LINE_INT8, CALIBRATED, CALIBRATED_INT8, FULL_INT8, ALONE}
    names = {SCAR, LIVE, LIVE_INT8, SURVIVORS, SWEEP, LIKELIHOOD, LIKELIHOOD_SWEEP} | of_numbers
    return [policy for policy in policies if policy.name in names]
