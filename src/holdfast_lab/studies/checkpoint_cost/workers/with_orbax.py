"""Orbax, the checkpoints of JAX, synchronous and asynchronous."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def _orbax() -> Any:
    return importlib.import_module("orbax.checkpoint")


def _jax() -> Any:
    return importlib.import_module("jax")


def versions() -> dict[str, str]:
    """Return the versions measured."""
    return {"orbax": _orbax().__version__, "jax": _jax().__version__, "numpy": np.__version__}


def make(task: Row, seed: int) -> Row:
    """Return arrays with the shapes of real layers, and the optimizer's state after a step."""
    jax, optax = _jax(), importlib.import_module("optax")
    rng = np.random.default_rng(seed)
    names = {f"layer_{place:03d}": _layer(layer, rng) for place, layer in enumerate(task["layers"])}
    weights = jax.tree.map(jax.numpy.asarray, names)
    state = {"model": weights}
    if task["optimizer"] != "none":
        optimizer = optax.sgd(1e-3, momentum=0.9) if task["optimizer"] == "momentum" else optax.adam(1e-3)
        gradients = jax.tree.map(lambda x: jax.numpy.asarray(rng.standard_normal(x.shape, dtype=np.float32)), weights)
        state["optimizer"] = optimizer.update(gradients, optimizer.init(weights), weights)[1]
    return {"tree": jax.block_until_ready(state), "count": _trained(task["layers"])}


def _layer(layer: Row, rng: Any) -> Row:
    outputs = layer["outputs"]

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    if layer["kind"] == "norm":
        return {name: draw(outputs) for name in ("scale", "bias", "mean", "variance")}
    shape: tuple[int, ...] = (layer["inputs"], outputs)
    if layer["kind"] == "convolution":
        shape = (layer["kernel"], layer["kernel"], *shape)
    return {"kernel": draw(*shape), **({"bias": draw(outputs)} if layer["bias"] else {})}


def _trained(layers: list[Row]) -> int:
    """Count a norm's scale and bias, but not its running averages."""
    total = 0
    for layer in layers:
        if layer["kind"] == "norm":
            total += 2 * layer["outputs"]
        else:
            total += layer["inputs"] * layer["outputs"] * layer.get("kernel", 1) ** 2 + layer["bias"] * layer["outputs"]
    return total


def parameters(state: Row) -> int:
    """Return the number of trained parameters."""
    count: int = state["count"]
    return count


def values(state: Row, whole: bool) -> Iterator[Any]:
    """Yield every saved array."""
    tree = state["tree"] if whole else state["tree"]["model"]
    for leaf in _jax().tree.leaves(tree):
        yield np.ascontiguousarray(leaf)


def ways() -> dict[str, Any]:
    """Return the ways to save, by name; by default Orbax compresses with zstd."""
    way = importlib.import_module("measure").SaveMethod
    return {
        "orbax": way(save=_save, load=_load, packed=True, keep=_keep),
        "orbax async": way(save=_save_async, load=_load, packed=True, finish=_finish),
    }


def _save(state: Row, folder: Path, _: Any) -> None:
    with _orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "checkpoint").absolute(), state["tree"], force=True)


def _save_async(state: Row, folder: Path, _: Any) -> None:
    state["checkpointer"] = _orbax().StandardCheckpointer()
    state["checkpointer"].save((folder / "checkpoint").absolute(), state["tree"], force=True)


def _finish(state: Row) -> None:
    checkpointer = state.pop("checkpointer")
    checkpointer.wait_until_finished()
    checkpointer.close()


def _load(state: Row, folder: Path) -> None:
    with _orbax().StandardCheckpointer() as checkpointer:
        state["tree"] = checkpointer.restore((folder / "checkpoint").absolute(), state["tree"])


def _keep(state: Row, folder: Path, count: int) -> None:
    orbax = _orbax()
    options = orbax.CheckpointManagerOptions(max_to_keep=2)
    with orbax.CheckpointManager(folder.absolute(), options=options) as manager:
        for step in range(count):
            manager.save(step, args=orbax.args.StandardSave(state["tree"]))
        manager.wait_until_finished()
