"""What a job on Ray needs, read from configurations like those of ``ray.train``. Pure: does not import Ray.

The classes of ``ray.train`` are accepted as they are. Ray's own need the packages of ``ray[train]``; those here do not.
A field that Ray has and that would have no effect here is refused, unless it has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.config import MOST_WORKERS
from holdfast.errors import refuse

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "label_selector": (None,),
    "use_tpu": (False,),
    "topology": (None,),
    "trainer_resources": (None, {}),
    "storage_filesystem": (None,),
    "callbacks": (None, []),
    "checkpoint_score_attribute": (None,),
}
"""Fields of Ray's classes that are not supported, with the values that ask for nothing."""
_UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How many workers, and what each needs; like ``ray.train.ScalingConfig``.

    Args:
        num_workers: Workers, or ``(min, max)``: the job begins with at least ``min`` and grows to ``max`` as resources
            appear.
        use_gpu: Whether each worker needs a GPU.
        resources_per_worker: Resources of each worker; usually ``{"CPU": 1}``, and a GPU if ``use_gpu``.
        placement_strategy: How Ray places the nodes of the job, one of :data:`STRATEGIES`. It applies to the first
            ``min`` workers; later ones are placed where there is room.
        accelerator_type: Type of accelerator that each node must have, such as ``"H100"``; None: any.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Name and place of a run; like ``ray.train.RunConfig``.

    Args:
        name: Name of the run: a directory in ``storage_path``.
        storage_path: Directory or URL that all nodes can access; checkpoints and the report are written there. None:
            neither is written, unless the option ``checkpoint_dir`` is given.
    """

    name: str | None = None
    storage_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScale:
    """The nodes of a job on Ray; a node is one bundle of a placement group, with one launcher.

    Args:
        min_nodes: Nodes with which the job begins, at least.
        max_nodes: Nodes of the job.
        workers_per_node: Workers of each.
        bundle: Resources of each node, as Ray names them.
        strategy: Placement strategy.
    """

    min_nodes: int
    max_nodes: int
    workers_per_node: int
    bundle: Mapping[str, float]
    strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a run writes, and what its configuration says about failures.

    Args:
        folder: Directory or URL of the run, or "".
        options: Options of the job that follow from the configuration.
        runtime_env: Ray's runtime environment of the nodes.
    """

    folder: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


def read_scaling(config: Any, workers_per_node: int) -> JobScale:
    """Return the nodes that a scaling configuration asks for.

    Raises:
        ConfigError: if a value is not allowed, or the workers do not fill whole nodes.
    """
    _check_effects(config)
    least, most = _range(config.num_workers)
    _check_whole("workers_per_node", workers_per_node)
    for workers in (least, most):
        if workers % workers_per_node:
            refuse(f"num_workers must be a multiple of workers_per_node ({workers_per_node}), got {workers}")
    strategy = config.placement_strategy
    if strategy not in STRATEGIES:
        refuse(f"placement_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return JobScale(
        min_nodes=least // workers_per_node,
        max_nodes=most // workers_per_node,
        workers_per_node=workers_per_node,
        bundle=_bundle(config, workers_per_node),
        strategy=strategy,
    )


def _range(value: Any) -> tuple[int, int]:
    least, most = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    for number in (least, most):
        _check_whole("num_workers", number, value)
    if least > most:
        refuse(f"num_workers must be (min, max) with min at most max, got {value!r}")
    if most > MOST_WORKERS:
        refuse(f"num_workers must be at most {MOST_WORKERS}, got {value!r}")
    return least, most


def _check_whole(name: str, number: Any, value: Any = None) -> None:
    if type(number) is not int or number < 1:
        pair = ", or a pair (min, max) of them" if name == "num_workers" else ""
        refuse(f"{name} must be a whole number, at least 1{pair}, got {number if value is None else value!r}")


def _bundle(config: Any, workers_per_node: int) -> dict[str, float]:
    resources = config.resources_per_worker
    each = {"CPU": 1.0, **({"GPU": 1.0} if config.use_gpu else {})} if resources is None else dict(resources)
    if config.use_gpu:
        each.setdefault("GPU", 1.0)
    for name, amount in each.items():
        if not isinstance(amount, int | float) or not amount >= 0:
            refuse(f"resources_per_worker[{name!r}] must be a number, at least 0, got {amount!r}")
    if each.get("GPU") and not config.use_gpu:
        refuse(f"resources_per_worker asks for {each['GPU']:g} GPU, and use_gpu is False: set use_gpu=True")
    if config.use_gpu and each["GPU"] != 1:
        refuse(f"resources_per_worker['GPU'] must be 1, since each worker uses one GPU, got {each['GPU']:g}")
    bundle = {name: amount * workers_per_node for name, amount in each.items() if amount}
    if config.accelerator_type:
        bundle[f"accelerator_type:{config.accelerator_type}"] = 0.001  # as Ray itself asks for a type
    if not bundle:
        refuse("resources_per_worker must ask for something, such as {'CPU': 1}, got nothing")
    return bundle


def read_run(config: Any) -> RunPlace:
    """Return place and options of a run.

    ``failure_config.max_failures`` becomes ``max_restarts``, ``checkpoint_config.num_to_keep`` becomes ``keep_last``.

    Raises:
        ConfigError: if a value is not allowed.
    """
    _check_effects(config)
    options: dict[str, Any] = {}
    failures, checkpoints = getattr(config, "failure_config", None), getattr(config, "checkpoint_config", None)
    if failures is not None:
        options["max_restarts"] = _UNLIMITED if failures.max_failures < 0 else failures.max_failures
    if checkpoints is not None:
        _check_effects(checkpoints)
        if checkpoints.num_to_keep is not None:
            options["keep_last"] = checkpoints.num_to_keep
    name, storage = config.name, config.storage_path
    if name and not storage:
        refuse(f"the run {name!r} needs a storage_path: a directory or URL that all nodes can access")
    if name and ("/" in name or name in (".", "..")):
        refuse(f"the name of a run must be the name of a directory, got {name!r}")
    folder = "/".join(filter(None, (str(storage or "").rstrip("/"), name)))
    if folder and "://" not in folder:  # nodes have directories of their own
        folder = str(Path(folder).expanduser().absolute())
    return RunPlace(folder=folder, options=options, runtime_env=dict(getattr(config, "worker_runtime_env", None) or {}))


def _check_effects(config: Any) -> None:
    for name, idle in _WITHOUT_EFFECT.items():
        if (value := getattr(config, name, None)) is not None and value not in idle:
            refuse(f"{type(config).__name__}.{name} is not supported by HoldfastTrainer, got {value!r:.80}")
