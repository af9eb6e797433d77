"""Descriptions of the policies of the partial recovery study, and the source of each, for its page."""

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
from holdfast_lab.studies.scar.rows import TrialRows
from holdfast_lab.studies.sections import Section, table, text

_PAPER, _BEYOND, _OURS = "paper", "beyond it", "beyond it, of this study"
_CONTROL, _BOUND = "control", "bound"
_TOLD = {
    TRADITIONAL: (_PAPER, "All blocks are saved every C iterations, and after a failure all blocks are rolled back."),
    PARTIAL: (_PAPER, "The same saves, but only lost blocks are restored."),
    SCAR: (_PAPER, "Every C / 8 iterations, save the eighth of the blocks that is farthest from its last saved value."),
    NO_CHECKPOINT: (_CONTROL, "Nothing is saved; lost blocks are reset to x(0)."),
    RESEED: (_CONTROL, "Nothing is lost, but all later random draws differ: the cost of chance alone."),
    HINDSIGHT: (_BOUND, "Every save is chosen knowing the time of the failure, to minimize the distance then."),
    HINDSIGHT_WHO: (_BOUND, "The same, with knowledge of the failed nodes, too."),
    LINE: (
        _BEYOND,
        "A lost block is extrapolated linearly from its last two saves. The blocks farthest from their extrapolation "
        "are saved, not those farthest from their last saved value.",
    ),
    INT8: (
        _BEYOND,
        "Saves hold differences from the last saved values, quantized to one byte each, so that about three times as "
        "many blocks fit into the same bytes. Values that are never negative, such as Adam's mean squares, are "
        "restored to at least half a quantization step, because a 0 would make the next update as large as possible.",
    ),
    LINE_INT8: (_BEYOND, "Both: one-byte differences from the extrapolation."),
    CALIBRATED: (
        _OURS,
        "Dead reckoning calibrated by the survivors, whose true movement along their own extrapolation is known: a "
        "share between 0 and 1, by least squares. Lost blocks move by that share of theirs. Meant for steps that "
        "shrink or are noisy, where extrapolation goes too far; it needs no extra bytes.",
    ),
    CALIBRATED_INT8: (_OURS, "The same, with one-byte differences."),
    FULL_INT8: (_BEYOND, "Full saves of one-byte differences, so more often; only lost blocks are restored."),
    ALONE: (_BEYOND, "Only parameters are saved, so more often; moments and step counts of lost blocks are reset."),
    RESET: (_CONTROL, "SCAR, but moments and step counts of lost blocks are reset although they were saved."),
    KEPT: (_CONTROL, "SCAR, and a peer holds the moments at the failure."),
    LIVE: (_BEYOND, "Only the factor that is read next is saved, so more often; the other is overwritten unread."),
    LIVE_INT8: (_BEYOND, "The same with one-byte differences."),
    SURVIVORS: (_CONTROL, "Nothing is saved; lost rows are solved from the other factor on the survivors."),
    SWEEP: (_BEYOND, "SCAR, then one resampling of the lost documents' topics, counted as a part of an iteration."),
    LIKELIHOOD: (_BEYOND, "Save the documents whose log-likelihood would change most if restored from the last save."),
    LIKELIHOOD_SWEEP: (_BEYOND, "Both."),
}  # fmt: skip
"""Source and description of each policy."""
CHOSEN = (
    "How a policy is chosen: next to a failure-free run, about two dozen failures are rehearsed on copies of its "
    "state, and each policy without hindsight restores them. The policy with the lowest mean cost is chosen, and "
    "evaluated on other seeds."
)


def policies_table(trials: TrialRows) -> Section:
    """Return the table that describes the tried policies."""
    tried = {policy for program in trials.programs() for policy in trials.policies(program)}
    lines = [
        {"policy": called(policy), "whose": whose, "what": what}
        for policy, (whose, what) in _TOLD.items()
        if policy in tried
    ]
    return table(
        "policies",
        "The policies",
        f"Each policy writes at most the bytes of one full save per C iterations. {CHOSEN}",
        lines,
        by=["policy"],
        columns=[text("whose", "source"), text("what", "description")],
    )
