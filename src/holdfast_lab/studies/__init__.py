"""Experiments that repeat the measurements of a paper with this code.

``STUDIES`` lists them by name; ``holdfast study --list`` prints the list.
"""

from __future__ import annotations

from holdfast_lab.studies.base import Study, carry_out
from holdfast_lab.studies.checkpoint_cost.study import CheckpointCost
from holdfast_lab.studies.exact.study import Exact
from holdfast_lab.studies.guard.study import Guard
from holdfast_lab.studies.parallelism.study import Parallelism
from holdfast_lab.studies.resilience.study import Resilience
from holdfast_lab.studies.scar.study import Scar
from holdfast_lab.studies.soft_errors.study import SoftErrors

__all__ = ["STUDIES", "carry_out"]

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (CheckpointCost(), Exact(), Guard(), Parallelism(), Resilience(), Scar(), SoftErrors())
}
"""All studies by name."""
