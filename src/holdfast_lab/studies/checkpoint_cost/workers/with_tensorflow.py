"""TensorFlow and Keras: TF checkpoints, ``.weights.h5``, ``.keras``, SavedModel; MultiWorkerMirroredStrategy."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def _tensorflow() -> Any:
    return importlib.import_module("tensorflow")


def _keras() -> Any:
    return importlib.import_module("keras")


def versions() -> dict[str, str]:
    """Return the versions measured."""
    return {"tensorflow": _tensorflow().__version__, "keras": _keras().__version__, "numpy": np.__version__}


def make(task: Row, seed: int) -> Any:
    """Return a Keras model of real layers, compiled with an optimizer that has made a step."""
    keras, tensorflow = _keras(), _tensorflow()
    keras.utils.set_random_seed(seed)
    model = _model(task["layers"])
    if task["optimizer"] == "none":
        return {"model": model, "optimizer": None}
    optimizer = (
        keras.optimizers.SGD(1e-3, momentum=0.9) if task["optimizer"] == "momentum" else keras.optimizers.Adam(1e-3)
    )
    model.compile(optimizer=optimizer, loss="mse")
    weights = model.trainable_variables
    optimizer.build(weights)
    optimizer.apply_gradients([(tensorflow.random.normal(weight.shape), weight) for weight in weights])
    return {"model": model, "optimizer": optimizer}


def _model(layers: list[Row]) -> Any:
    """Return a functional model; the layers are parallel branches, so any list of them is a model."""
    keras = _keras()
    inputs: dict[str, Any] = {}
    outputs = []
    for place, layer in enumerate(layers):
        built, shape = _layer(keras, layer)
        name = f"input_{'_'.join('any' if size is None else str(size) for size in shape)}"
        given = inputs.setdefault(name, keras.Input(shape, name=name))
        built._name = f"layer_{place:03d}"
        outputs.append(built(given))
    return keras.Model(list(inputs.values()), outputs)


def _layer(keras: Any, layer: Row) -> tuple[Any, tuple[int | None, ...]]:
    outputs = layer["outputs"]
    if layer["kind"] == "norm":
        return keras.layers.BatchNormalization(), (None, None, outputs)
    if layer["kind"] == "linear":
        return keras.layers.Dense(outputs, use_bias=layer["bias"]), (layer["inputs"],)
    convolution = keras.layers.Conv2D(outputs, layer["kernel"], use_bias=layer["bias"], padding="same")
    return convolution, (None, None, layer["inputs"])


def parameters(state: Row) -> int:
    """Return the number of trained parameters."""
    return sum(int(np.prod(weight.shape)) for weight in state["model"].trainable_variables)


def values(state: Row, whole: bool) -> Iterator[Any]:
    """Yield every saved array."""
    for weight in state["model"].weights:
        yield np.asarray(weight)
    optimizer = state["model"].optimizer if whole and state["optimizer"] is not None else None
    for weight in optimizer.variables if optimizer is not None else ():
        yield np.asarray(weight)


def ways() -> dict[str, Any]:
    """Return the ways to save, by name."""
    way = importlib.import_module("measure").SaveMethod
    return {
        "tf checkpoint": way(save=_save_checkpoint, load=_load_checkpoint, keep=_keep_checkpoint),
        "weights.h5": way(save=partial(_save_weights, "checkpoint.weights.h5"), load=partial(_load_weights, "checkpoint.weights.h5")),
        "keras": way(save=_save_keras, load=_load_keras),
        "savedmodel": way(save=_save_savedmodel, load=_load_savedmodel, whole=False),
    }  # fmt: skip


def _checkpoint(state: Row) -> Any:
    tracked = {"model": state["model"]}
    if state["optimizer"] is not None:
        tracked["optimizer"] = state["model"].optimizer
    return _tensorflow().train.Checkpoint(**tracked)


def _save_checkpoint(state: Row, folder: Path, _: Any) -> None:
    _checkpoint(state).write(str(folder / "checkpoint"))


def _load_checkpoint(state: Row, folder: Path) -> None:
    _checkpoint(state).read(str(folder / "checkpoint")).assert_consumed()


def _keep_checkpoint(state: Row, folder: Path, count: int) -> None:
    manager = _tensorflow().train.CheckpointManager(_checkpoint(state), str(folder), max_to_keep=2)
    for _ in range(count):
        manager.save()


def _save_weights(name: str, state: Row, folder: Path, _: Any) -> None:
    state["model"].save_weights(folder / name, overwrite=True)


def _load_weights(name: str, state: Row, folder: Path) -> None:
    state["model"].load_weights(folder / name)


def _save_keras(state: Row, folder: Path, _: Any) -> None:
    state["model"].save(folder / "checkpoint.keras", overwrite=True)


def _load_keras(state: Row, folder: Path) -> None:
    state["model"] = _keras().saving.load_model(folder / "checkpoint.keras")


def _save_savedmodel(state: Row, folder: Path, _: Any) -> None:
    state["model"].export(folder / "checkpoint", verbose=False)


def _load_savedmodel(state: Row, folder: Path) -> None:
    loaded = _tensorflow().saved_model.load(str(folder / "checkpoint"))
    for ours, theirs in zip(state["model"].weights, loaded.variables, strict=True):
        ours.assign(theirs)


# -- determinism


def pieces() -> list[str]:
    """Return the pieces of a run's state; Keras draws dropout from a seed that each layer keeps."""
    return ["model", "optimizer", "scheduler", "framework rng", "python rng", "sampler"]


def saved_by_default() -> list[str]:
    """Return the pieces in ``model.save``: weights, optimizer with its step and rate, the seeds of dropout layers."""
    return ["model", "optimizer", "framework rng"]


def training(task: Row) -> TensorflowTraining:
    """Return a new training."""
    return TensorflowTraining(task)


class TensorflowTraining:
    """A small network with dropout, momentum, a schedule, shuffled samples and noise on the images."""

    def __init__(self, task: Row) -> None:
        keras, tensorflow = _keras(), _tensorflow()
        tensorflow.config.experimental.enable_op_determinism()
        keras.backend.clear_session()
        keras.utils.set_random_seed(task["seed"])
        data = np.load(task["data"])
        self._x, self._y = np.ascontiguousarray(np.moveaxis(data["x"], 1, 3)), data["y"]
        self._batch, self._decay_every, self._seed = task["batch"], task["decay_every"], task["seed"]
        self._dropout = keras.layers.Dropout(0.25, seed=task["seed"])
        self._model = keras.Sequential(
            [
                keras.Input(self._x.shape[1:]),
                keras.layers.Conv2D(8, 3, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Flatten(),
                self._dropout,
                keras.layers.Dense(10),
            ]
        )
        self._optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        self._optimizer.build(self._model.trainable_variables)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._scheduler = {"steps": 0}
        self._sampler = {"epoch": 0, "position": 0}

    def step(self, _: int) -> None:
        """Train on one mini-batch."""
        chosen = next_samples(self._sampler, self._seed, len(self._x), self._batch)
        x = self._x[chosen] + np.float32(random.gauss(0, 0.1))
        with _tensorflow().GradientTape() as tape:
            loss = self._loss(self._y[chosen], self._model(x, training=True))
        weights = self._model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, weights), weights)
        self._scheduler["steps"] += 1
        self._set_rate()

    def _set_rate(self) -> None:
        self._optimizer.learning_rate = 0.05 * 0.5 ** (self._scheduler["steps"] // self._decay_every)

    def _parts(self) -> dict[str, list[Any]]:
        seed = [self._dropout.seed_generator.state]
        seeds = {id(variable) for variable in seed}
        rate = id(self._optimizer.learning_rate)
        return {
            "model": [variable for variable in self._model.variables if id(variable) not in seeds],
            "optimizer": [variable for variable in self._optimizer.variables if id(variable) != rate],
            "framework rng": seed,
        }

    def save(self, path: Path) -> None:
        """Save every piece."""
        for name, variables in self._parts().items():
            _tensorflow().train.Checkpoint(values=_tracked(variables)).write(f"{path}.{name.replace(' ', '-')}")
        path.write_text(
            json.dumps({"scheduler": self._scheduler, "sampler": self._sampler, "python rng": random.getstate()})
        )

    def load(self, path: Path, loaded: list[str]) -> None:
        """Load some pieces."""
        for name, variables in self._parts().items():
            if name in loaded:
                checkpoint = _tensorflow().train.Checkpoint(values=_tracked(variables))
                checkpoint.read(f"{path}.{name.replace(' ', '-')}").assert_consumed()
        content = json.loads(path.read_text())
        if "scheduler" in loaded:
            self._scheduler = content["scheduler"]
            self._set_rate()
        if "python rng" in loaded:
            version, numbers, gauss = content["python rng"]
            random.setstate((version, tuple(numbers), gauss))
        if "sampler" in loaded:
            self._sampler = content["sampler"]

    def weights(self) -> list[Any]:
        """Return parameters and running averages."""
        return [np.asarray(variable) for variable in self._parts()["model"]]


def _tracked(variables: list[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def next_samples(sampler: dict[str, int], seed: int, total: int, batch: int) -> Any:
    """Return the indices of the next mini-batch, and advance the sampler."""
    order = np.random.RandomState(seed + 1000 * sampler["epoch"]).permutation(total)
    chosen = order[sampler["position"] : sampler["position"] + batch]
    sampler["position"] += batch
    if sampler["position"] + batch > total:
        sampler["position"], sampler["epoch"] = 0, sampler["epoch"] + 1
    return chosen


# -- several workers


def share(task: Row) -> list[Row]:
    """Train with MultiWorkerMirroredStrategy; save at the root, and at every rank."""
    tensorflow = _tensorflow()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workers = [f"127.0.0.1:{port}" for port in _ports(task["rendezvous"], rank, world_size)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    strategy = tensorflow.distribute.MultiWorkerMirroredStrategy()
    side, batch = task["side"], max(1, task["batch"] // world_size)
    with strategy.scope():
        tensorflow.random.set_seed(task["seed"])
        weights = [
            tensorflow.Variable(tensorflow.random.normal(shape, stddev=0.01)) for shape in _shapes(task["layers"])
        ]
        momentum = [tensorflow.Variable(tensorflow.zeros_like(weight)) for weight in weights]
    x = tensorflow.random.normal((batch, side, side, 3))
    y = tensorflow.random.uniform((batch,), maxval=10, dtype=tensorflow.int64)

    def one_step() -> Any:
        with tensorflow.GradientTape() as tape:
            logits = _forward(tensorflow, task["layers"], weights, x)
            loss = tensorflow.reduce_mean(tensorflow.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, weights)
        context = tensorflow.distribute.get_replica_context()
        for weight, held, gradient in zip(
            weights, momentum, context.all_reduce(tensorflow.distribute.ReduceOp.MEAN, gradients), strict=True
        ):
            held.assign(0.9 * held + gradient)
            weight.assign(weight - 1e-3 * held)
        return loss

    step = tensorflow.function(lambda: strategy.run(one_step))
    meet = tensorflow.function(lambda: strategy.run(lambda: _sum_over(tensorflow, tensorflow.ones(()))))
    times_s = []
    for number in range(task["steps"] + 1):  # the first compiles
        meet()
        start_s = time.perf_counter()
        step()
        meet()
        if number:
            times_s.append(time.perf_counter() - start_s)
    checkpoint = tensorflow.train.Checkpoint(weights=weights, momentum=momentum)
    rows = []
    for repetition in range(task["repetitions"]):
        for scheme in task["schemes"]:
            row = _save_together(scheme, checkpoint, Path(task["folder"]) / scheme, rank, world_size, meet)
            rows.append({"scheme": scheme, "repetition": repetition, "step_s": float(np.median(times_s)), **row})
    if task.get("keep"):
        for scheme in task["schemes"]:
            _save_together(scheme, checkpoint, Path(task["folder"]) / scheme, rank, world_size, meet, keep=True)
        kept = importlib.import_module("measure").digest(np.asarray(variable) for variable in (*weights, *momentum))
        rows = [{**row, "sha256": kept} for row in rows]
    meet()
    return rows


def load_together(task: Row, scheme: str, folder: Path, rank: int) -> list[Any]:
    """Load as a rank of another number of workers; return every array."""
    tensorflow = _tensorflow()
    weights, momentum = (
        [tensorflow.Variable(tensorflow.zeros(shape)) for shape in _shapes(task["layers"])] for _ in range(2)
    )
    checkpoint = tensorflow.train.Checkpoint(weights=weights, momentum=momentum)
    checkpoint.read(str(folder / f"run.{rank if scheme == 'rank' else 0}.1")).assert_existing_objects_matched()
    return [np.asarray(variable) for variable in (*weights, *momentum)]


def _sum_over(tensorflow: Any, value: Any) -> Any:
    return tensorflow.distribute.get_replica_context().all_reduce(tensorflow.distribute.ReduceOp.SUM, value)


def _ports(rendezvous: str, rank: int, world_size: int) -> list[int]:
    """Return a free port of every rank, exchanged through files."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = Path(f"{rendezvous}.{rank}")
        own.with_suffix(own.suffix + ".tmp").write_text(str(free.getsockname()[1]))
    own.with_suffix(own.suffix + ".tmp").replace(own)
    paths = [Path(f"{rendezvous}.{other}") for other in range(world_size)]
    end_s = time.monotonic() + 120.0
    while not all(path.exists() for path in paths):
        if time.monotonic() > end_s:
            raise TimeoutError("another rank did not start within two minutes")
        time.sleep(0.05)
    return [int(path.read_text()) for path in paths]


def _shapes(layers: list[Row]) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for layer in layers:
        sizes = (layer["inputs"], layer["outputs"])
        shapes.append(sizes if layer["kind"] == "linear" else (layer["kernel"], layer["kernel"], *sizes))
        shapes.append((layer["outputs"],))
    return shapes


def _forward(tensorflow: Any, layers: list[Row], weights: list[Any], x: Any) -> Any:
    """Run AlexNet, or a similar chain of layers: images are pooled where AlexNet pools them."""
    nn = tensorflow.nn
    for place, layer in enumerate(layers):
        weight, bias = weights[2 * place], weights[2 * place + 1]
        if layer["kind"] == "linear":
            if len(x.shape) == 4:
                wanted = 6 if layer["inputs"] == x.shape[3] * 36 else 1
                x = tensorflow.reshape(tensorflow.image.resize(x, (wanted, wanted)), (x.shape[0], layer["inputs"]))
            x = x @ weight + bias
        else:
            x = nn.conv2d(x, weight, layer["stride"], "SAME") + bias
            if place in (0, 1, 4) and min(x.shape[1:3]) > 3:
                x = nn.max_pool2d(x, 3, 2, "VALID")
        if place + 1 < len(layers):
            x = nn.relu(x)
    return x


def _save_together(
    scheme: str, checkpoint: Any, folder: Path, rank: int, world_size: int, meet: Any, keep: bool = False
) -> Row:
    measure = importlib.import_module("measure")
    folder.mkdir(parents=True, exist_ok=True)
    meet()
    start_s = time.perf_counter()
    if scheme == "rank" or rank == 0:
        checkpoint.write(str(folder / f"run.{rank}.1"))
        measure.sync_files(folder, f"run.{rank}.1")
    own_s = time.perf_counter() - start_s
    meet()
    save_s = time.perf_counter() - start_s
    told = folder.parent / f"{scheme}.waited.{rank}"
    told.write_text(str(save_s - own_s))
    meet()
    waits_s = [float((folder.parent / f"{scheme}.waited.{other}").read_text()) for other in range(world_size)]
    files = [path for path in folder.iterdir() if path.is_file()]
    size_bytes = sum(path.stat().st_size for path in files)
    meet()
    if rank == 0 and not keep:
        shutil.rmtree(folder)
    meet()
    return {"save_s": save_s, "wait_s": sum(waits_s) / world_size, "bytes": size_bytes, "files": len(files)}
