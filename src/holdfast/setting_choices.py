"""The values that settings with a choice may have."""

from __future__ import annotations

from holdfast.base.orders import ORDERS as NAMED_ORDERS
from holdfast.checkpoint.files.registry import FORMATS
from holdfast.comm.fabrics.registry import BUILT_IN as FABRICS_BUILT_IN
from holdfast.recovery.registry import BUILT_IN

FABRICS = tuple(FABRICS_BUILT_IN)
CHECKPOINT_FORMATS = tuple(FORMATS)
STRATEGIES = tuple(BUILT_IN)
EMPTY_SEATS = ("fill", "survivors", "raise")
REINIT_FROM = ("own", "root", "checkpoint")
MIRROR_CHOICES = ("priority", "round-robin", "random")
MIRROR_DISTANCES = ("euclidean", "scaled")
MIRROR_PREDICTORS = ("last", "line", "calibrated")
MIRROR_CODECS = ("exact", "int8")
MIRROR_OPTIMIZERS = ("saved", "reset", "kept")
AUTO = "auto"
ORDERS = (AUTO, *NAMED_ORDERS)
WIRES = ("fp32", "bf16")
BETWEEN_HOSTS = ("fabric", "nccl")
OVERLAPS = ("auto", "on", "off")
SPLITS = ("slices", "even")
BATCHES = ("global", "local")
RESCALES = ("survivors", "original")
GUARDS = ("stop", "warn", "heal", "off")

POLICIES = ("ignore", "warn", "rebalance", "replace")
