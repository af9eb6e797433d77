"""What survivors decide after a failure, as it stands in records: one table for everything that shows or judges it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision.

    Args:
        sentence: What happens, for a person; ``{step}`` is the step that training goes on with.
        goes_back: Steps that were committed before are committed again.
    """

    sentence: str
    goes_back: bool = False


DECISIONS = {
    "redo": Decision(sentence="step {step} is computed again"),
    "continue": Decision(sentence="step {step} goes on"),
    "load": Decision(sentence="back to step {step} from the newest checkpoint", goes_back=True),
    "reinit": Decision(sentence="the application is built again, and goes on at step {step}", goes_back=True),
    "heal": Decision(sentence="back to step {step}, the newest that is known to be right,", goes_back=True),
    "stop": Decision(sentence="too few to go on: saving at step {step}"),
    "grow": Decision(sentence="members have changed"),
}
"""By what :class:`~holdfast.records.types.Recovered` calls it. ``grow``: members changed, and nothing failed."""


def decision_of(name: str) -> Decision:
    """Return the decision that a record calls ``name``; one that this version does not know goes nowhere back."""
    return DECISIONS.get(name, Decision(sentence=name))
