"""Lightning and Fabric over Holdfast: ``Trainer(strategy="holdfast")``, ``Fabric(strategy="holdfast")``.

To Lightning every process trains alone, on the mini-batches of the whole job. Beneath, each process computes only its
slices of a mini-batch, and every step is committed on all workers or on none. Start scripts with ``holdfast run``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.lazy import lazy

if TYPE_CHECKING:
    from holdfast.integrations.lightning.checkpoint_io import HoldfastCheckpointIO
    from holdfast.integrations.lightning.environment import HoldfastEnvironment
    from holdfast.integrations.lightning.fabric import HoldfastFabricStrategy
    from holdfast.integrations.lightning.strategy import HoldfastStrategy

_WHERE = {
    "HoldfastCheckpointIO": "holdfast.integrations.lightning.checkpoint_io",
    "HoldfastEnvironment": "holdfast.integrations.lightning.environment",
    "HoldfastFabricStrategy": "holdfast.integrations.lightning.fabric",
    "HoldfastStrategy": "holdfast.integrations.lightning.strategy",
}

__all__ = ["HoldfastCheckpointIO", "HoldfastEnvironment", "HoldfastFabricStrategy", "HoldfastStrategy"]

__getattr__ = lazy(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted(__all__)
