"""What each policy of the study of partial recovery does, in a sentence or two, and whose idea it is: for its page."""

from __future__ import annotations

from holdfast_lab.studies.scar.figures import called
from holdfast_lab.studies.scar.policies import (
    ALONE,
    CALIBRATED,
    CALIBRATED_INT8,
    FULL_INT8,
    HINDSIGHT,
    HINDSIGHT_WHO,
    INT8,
    KEPT,
    LIKELIHOOD,
    LIKELIHOOD_SWEEP,
    LINE,
    LINE_INT8,
    LIVE,
    LIVE_INT8,
    NO_CHECKPOINT,
    PARTIAL,
    RESEED,
    RESET,
    SCAR,
    SURVIVORS,
    SWEEP,
    TRADITIONAL,
)
from holdfast_lab.studies.scar.rows import Trials
from holdfast_lab.studies.sections import Section, table, text

_PAPER, _BEYOND, _OURS = "paper", "beyond it", "beyond it, of this study"
_CONTROL, _BOUND = "control", "bound"
_TOLD = {
    TRADITIONAL: (_PAPER, "All is saved every C iterations, and all go back to that."),
    PARTIAL: (_PAPER, "The same saves, but only the lost blocks go back."),
    SCAR: (_PAPER, "Every C / 8 iterations the eighth of the blocks is saved that is farthest from what was saved of it."),
    NO_CHECKPOINT: (_CONTROL, "Nothing is saved; lost blocks begin anew, as in x(0)."),
    RESEED: (_CONTROL, "Nothing is lost, but what is drawn afterwards is other: what chance alone costs."),
    HINDSIGHT: (_BOUND, "Every save was chosen by who knew when nodes die, so that the distance then is the least."),
    HINDSIGHT_WHO: (_BOUND, "The same by who also knew which nodes die."),
    LINE: (
        _BEYOND,
        "A lost block is restored to where the line through its last two saves leads, and the blocks are saved that are farthest "
        "from there, not from their last saved value.",
    ),
    INT8: (
        _BEYOND,
        "What is saved are steps of a byte from what is there already, so that some three times as many blocks go into the same bytes. Numbers that are never "
        "negative, as Adam's mean squares, come back no less than half a step: a 0 there would make the next update as large as it can be.",
    ),
    LINE_INT8: (_BEYOND, "Both: steps of a byte from where the line leads."),
    CALIBRATED: (
        _OURS,
        "Dead reckoning that asks the survivors. They know where they are, and so how much of the way along their own lines they have really gone: a share "
        "between 0 and 1, by least squares. The lost go that share of theirs. Meant for steps that shrink, or are noise, where lines lead too far; it needs no byte more.",
    ),
    CALIBRATED_INT8: (_OURS, "The same, saved as steps of a byte."),
    FULL_INT8: (_BEYOND, "Full saves in steps of a byte, which come as much sooner as they are smaller; only the lost go back."),
    ALONE: (_BEYOND, "Only parameters are saved, so more often; moments and step counts of lost blocks begin anew."),
    RESET: (_CONTROL, "SCAR, but moments and step counts of lost blocks begin anew though they were saved."),
    KEPT: (_CONTROL, "SCAR, and a peer has the moments as they were at the failure."),
    LIVE: (_BEYOND, "Of two factors only the one is saved that is read next, so more often; the other is overwritten before it is read."),
    LIVE_INT8: (_BEYOND, "The same in steps of a byte."),
    SURVIVORS: (_CONTROL, "Nothing is saved; lost rows are solved anew from the other factor of the survivors."),
    SWEEP: (_BEYOND, "SCAR, then the topics of the lost documents are drawn anew once; the sweep is counted as a part of an iteration."),
    LIKELIHOOD: (_BEYOND, "Those documents are saved whose log-likelihood would change most if they were as they were saved."),
    LIKELIHOOD_SWEEP: (_BEYOND, "Both."),
}  # fmt: skip
"""Whose idea it is, and what is done."""
CHOSEN = (
    "How the system chooses: beside an undisturbed run failures are rehearsed on copies of its state, some two dozen, and each policy that needs no foresight restores "
    "them; the one of the least mean cost is taken, and judged on seeds that it was not chosen on."
)


def policies_table(trials: Trials) -> Section:
    """Return what the policies do that were tried."""
    tried = {policy for program in trials.programs() for policy in trials.policies(program)}
    lines = [
        {"policy": called(policy), "whose": whose, "what": what}
        for policy, (whose, what) in _TOLD.items()
        if policy in tried
    ]
    return table(
        "policies",
        "What the policies do",
        f"All write at most the bytes of one full save in C iterations. {CHOSEN}",
        lines,
        by=["policy"],
        columns=[text("whose", "from"), text("what", "what is done")],
    )
