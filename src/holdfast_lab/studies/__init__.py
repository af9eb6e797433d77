"""Experiments that repeat the measurements of a paper with this code.

``STUDIES`` lists them by name; ``holdfast study --list`` prints the list.
"""

from __future__ import annotations

from holdfast_lab.studies.base import Study, carry_out
from holdfast_lab.studies.checkpoint_cost.study import STUDY as CHECKPOINT_COST
from holdfast_lab.studies.exact.study import STUDY as EXACT
from holdfast_lab.studies.guard.study import STUDY as GUARD
from holdfast_lab.studies.parallelism.study import STUDY as PARALLELISM
from holdfast_lab.studies.resilience.study import STUDY as RESILIENCE
from holdfast_lab.studies.scar.study import STUDY as SCAR
from holdfast_lab.studies.soft_errors.study import STUDY as SOFT_ERRORS

__all__ = ["STUDIES", "carry_out"]

STUDIES: dict[str, Study] = {
    study.name: study for study in (CHECKPOINT_COST, EXACT, GUARD, PARALLELISM, RESILIENCE, SCAR, SOFT_ERRORS)
}
"""All studies by name."""
