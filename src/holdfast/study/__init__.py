"""One experiment a file: what a paper measured, on this code.

``STUDIES`` says which there are; ``holdfast study --list`` prints it.
"""

from __future__ import annotations

from holdfast.study.base import Study, carry_out
from holdfast.study.checkpoint_cost import CheckpointCost
from holdfast.study.exact import Exact
from holdfast.study.guard import Guard
from holdfast.study.parallelism import Parallelism
from holdfast.study.resilience import Resilience
from holdfast.study.scar import Scar
from holdfast.study.soft_errors import SoftErrors

__all__ = ["STUDIES", "carry_out"]

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (CheckpointCost(), Exact(), Guard(), Parallelism(), Resilience(), Scar(), SoftErrors())
}
"""Every study by its name."""
