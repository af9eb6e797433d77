"""Networks and datasets by name, for the demo, the tests, the studies and the benchmarks.

``python -m holdfast_lab.workloads.train --help`` trains a network on a dataset; the same file is a script for
``holdfast run``.
"""

from __future__ import annotations

from holdfast_lab.workloads.data import DATASETS, load_dataset
from holdfast_lab.workloads.models import MODELS, loss_of, make_model, make_stage, stages
from holdfast_lab.workloads.optimizers import OPTIMIZERS, make_optimizer
from holdfast_lab.workloads.recipes import RECIPES, Recipe

__all__ = [
    "DATASETS",
    "MODELS",
    "OPTIMIZERS",
    "RECIPES",
    "Recipe",
    "load_dataset",
    "loss_of",
    "make_model",
    "make_optimizer",
    "make_stage",
    "stages",
]
