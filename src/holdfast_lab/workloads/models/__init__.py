"""Networks by name, whole or in stages, with real layers and seeded random weights.

A network is a sequence of named blocks, and each block draws its weights from its own seed. So a stage of a pipeline is
built without the other stages, with the same weights as in the whole network.
"""

from __future__ import annotations

from holdfast_lab.workloads.models.blocks import Block, NetworkLayout, build
from holdfast_lab.workloads.models.catalog import IMAGE_MODELS, MODELS, layout, make_model
from holdfast_lab.workloads.models.layers import layers_of, loss_of
from holdfast_lab.workloads.models.stages import make_stage, split, stages

__all__ = [
    "IMAGE_MODELS",
    "MODELS",
    "Block",
    "NetworkLayout",
    "build",
    "layers_of",
    "layout",
    "loss_of",
    "make_model",
    "make_stage",
    "split",
    "stages",
]
