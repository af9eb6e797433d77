"""Lets Accelerate, Lightning and Dynamo work with this backend, which know backends by name; notes sharded optimizers.

Their modules are changed when they are imported, and only in a process of a Holdfast job. In any other process, and for
any other backend, they stay as they are.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from holdfast.base.on_import import Change, when_imported

_BACKEND = "holdfast"


def adapt_frameworks() -> None:
    """Adapt the frameworks, now or when they are imported, if this process belongs to a job of Holdfast."""
    with_ulfm = os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI's spelling
    if not with_ulfm and not os.environ.get("HOLDFAST_STORE"):
        return
    when_imported(_CHANGES)


def _accept_backend(module: ModuleType) -> None:
    """Let Accelerate accept this backend on CPUs, too, for which it takes only ``gloo`` and ``mpi``."""
    state: Any = getattr(module, "PartialState", None)
    prepare = getattr(state, "_prepare_backend", None)
    if prepare is None:  # another version of Accelerate: it refuses the backend by itself
        return

    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str, Any]:
        import torch

        # On a GPU, Accelerate takes any backend.
        if backend != _BACKEND or (not cpu and torch.cuda.is_available()):
            return prepare(self, cpu, sagemaker_dp, backend)  # type: ignore[no-any-return]
        # Without `cpu`, a machine without a GPU would count as one process that trains alone.
        return backend, prepare(self, True, sagemaker_dp, None)[1]

    state._prepare_backend = prepare_backend


def _do_not_start_mpi(module: ModuleType) -> None:
    """Keep Lightning from finding its ranks by MPI: only the communication thread may use it.

    Its default environment finds them in the variables that the launcher sets. Its import of mpi4py would also finalize
    MPI at exit, which waits for failed ranks.
    """
    environment: Any = getattr(module, "MPIEnvironment", None)
    if environment is not None:
        environment.detect = staticmethod(lambda: False)


def _watch_sharded_optimizer(module: ModuleType) -> None:
    """Note that the optimizer's state is in parts. Imported late: this module is loaded while torch is imported."""
    from holdfast.distributed.parts import watch_sharded_optimizer

    watch_sharded_optimizer(module)


def _agree_on_a_survivor(module: ModuleType) -> None:
    """Let ``join()`` end where all ranks that still had data are lost: DDP looks for one of them to copy the model from."""
    from holdfast.base.torch_private import agree_on_common_rank  # late: it needs torch, which is being imported

    def survivor(group: Any) -> int | None:
        alive = getattr(group, "alive_places", [])
        return (
            int(alive[-1]) if 0 < len(alive) < group.size() else None
        )  # replicas are equal; DDP takes the largest, too

    agree_on_common_rank(module.DistributedDataParallel, survivor)


def _keep_out_of_graphs(module: ModuleType) -> None:
    """Keep Dynamo from tracing this package: in a compiled forward pass DDP calls the backend, which waits for ranks."""
    add = getattr(module, "add", None)  # another version of torch may have another name for it
    if add is not None:
        add(__name__.partition(".")[0])


_CHANGES: dict[str, Change] = {
    "torch._dynamo.trace_rules": _keep_out_of_graphs,
    "torch.nn.parallel.distributed": _agree_on_a_survivor,
    "accelerate.state": _accept_backend,
    "torch.distributed.optim.zero_redundancy_optimizer": _watch_sharded_optimizer,
    "lightning.fabric.plugins.environments.mpi": _do_not_start_mpi,
    "lightning_fabric.plugins.environments.mpi": _do_not_start_mpi,
}
