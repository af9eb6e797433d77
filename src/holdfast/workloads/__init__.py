"""Small models and real datasets, by name, for the demo, the tests and the benchmarks.

``python -m holdfast.workloads.train --help`` trains one on another; the same file is a script for
``holdfast run``.
"""

from __future__ import annotations

from holdfast.workloads.data import DATASETS, load_dataset
from holdfast.workloads.models import MODELS, make_model
from holdfast.workloads.optimizers import OPTIMIZERS, make_optimizer

__all__ = ["DATASETS", "MODELS", "OPTIMIZERS", "load_dataset", "make_model", "make_optimizer"]
