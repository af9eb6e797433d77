"""The decisions that survivors make after a failure, as named in records: one table for everything that reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision.

    Args:
        sentence: Readable description; ``{step}`` is the step at which training resumes.
        goes_back: Steps that were committed before are recomputed and committed again.
    """

    sentence: str
    goes_back: bool = False


DECISIONS = {
    "redo": Decision(sentence="step {step} is computed again"),
    "continue": Decision(sentence="step {step} continues"),
    "load": Decision(sentence="rollback to step {step} from the newest checkpoint", goes_back=True),
    "reinit": Decision(sentence="the application is rebuilt and resumes at step {step}", goes_back=True),
    "heal": Decision(sentence="rollback to step {step}, the newest verified state,", goes_back=True),
    "stop": Decision(sentence="too few workers: saving at step {step}"),
    "grow": Decision(sentence="the membership changed"),
}
"""By the name in :class:`~holdfast.records.types.Recovered`. ``grow``: the membership changed and nothing failed."""


def decision_of(name: str) -> Decision:
    """Return the decision that a record calls ``name``; an unknown name is a decision without rollback."""
    return DECISIONS.get(name, Decision(sentence=name))
