"""Chainer 7: npz, plain and compressed, and HDF5; ChainerMN's generational checkpoints over MPI."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def _chainer() -> Any:
    return importlib.import_module("chainer")


def versions() -> dict[str, str]:
    """Return what is measured."""
    return {"chainer": _chainer().__version__, "numpy": np.__version__}


def make(task: Row, seed: int) -> Any:
    """Return a network of real layers, with an optimizer that has made a step."""
    chainer = _chainer()
    np.random.seed(seed)
    model = chainer.ChainList(*map(_layer, task["layers"]))
    optimizers = {"momentum": chainer.optimizers.MomentumSGD, "adam": chainer.optimizers.Adam}
    optimizer = None
    if task["optimizer"] in optimizers:
        optimizer = optimizers[task["optimizer"]]().setup(model)
        for parameter in model.params():
            parameter.grad = np.random.standard_normal(parameter.shape).astype(np.float32)
        optimizer.update()
        model.cleargrads()
    return {"model": model, "optimizer": optimizer}


def _layer(layer: Row) -> Any:
    links = _chainer().links
    if layer["kind"] == "norm":
        return links.BatchNormalization(layer["outputs"])
    if layer["kind"] == "linear":
        return links.Linear(layer["inputs"], layer["outputs"], nobias=not layer["bias"])
    return links.Convolution2D(layer["inputs"], layer["outputs"], layer["kernel"], nobias=not layer["bias"])


def parameters(state: Row) -> int:
    """Return how many there are."""
    return int(state["model"].count_params())


def values(state: Row, whole: bool) -> Iterator[Any]:
    """Yield every saved array."""
    content = _dictionary(_together(state) if whole else state["model"])
    for name in sorted(content):
        yield np.ascontiguousarray(content[name])


def _dictionary(target: Any) -> dict[str, Any]:
    serializer = _chainer().serializers.DictionarySerializer()
    serializer.save(target)
    return {name: np.asarray(value) for name, value in serializer.target.items()}


class _Together:
    """Model and optimizer as one thing that Chainer can save, as its trainer is."""

    def __init__(self, state: Row) -> None:
        self._state = state

    def serialize(self, serializer: Any) -> None:
        self._state["model"].serialize(serializer["model"])
        if self._state["optimizer"] is not None:
            self._state["optimizer"].serialize(serializer["optimizer"])


def _together(state: Row) -> Any:
    return _Together(state)


def ways() -> dict[str, Any]:
    """Return the ways in which it saves, by name; HDF5 is compressed with gzip at level 4 unless told otherwise."""
    way = importlib.import_module("measure").Way
    return {
        "npz": way(save=partial(_save_npz, np.savez), load=_load_npz, divided=True),
        "npz compressed": way(save=partial(_save_npz, np.savez_compressed), load=_load_npz, divided=True, packed=True),
        "hdf5": way(save=partial(_save_hdf5, None), load=_load_hdf5),
        "hdf5 gzip": way(save=partial(_save_hdf5, 4), load=_load_hdf5, packed=True),
        "multi-node": way(save=_save_multi_node, load=_load_multi_node, packed=True, keep=_keep_multi_node),
    }


def _save_npz(savez: Any, state: Row, folder: Path, meter: Any) -> None:
    # What serializers.save_npz does, in two lines, so that the parts can be told apart.
    with meter.part("gather"):
        content = _dictionary(_together(state))
    with meter.file(folder / "checkpoint.npz") as file, meter.compressor():
        savez(file, **content)


def _load_npz(state: Row, folder: Path) -> None:
    _chainer().serializers.load_npz(str(folder / "checkpoint.npz"), _together(state))


def _save_hdf5(compression: int | None, state: Row, folder: Path, _: Any) -> None:
    h5py, serializer = importlib.import_module("h5py"), _chainer().serializers.HDF5Serializer
    with h5py.File(folder / "checkpoint.h5", "w") as file:
        serializer(file, compression=compression).save(_together(state))


def _load_hdf5(state: Row, folder: Path) -> None:
    _chainer().serializers.load_hdf5(str(folder / "checkpoint.h5"), _together(state))


def _checkpointer(folder: Path, communicator: Any = None) -> Any:
    chainermn = importlib.import_module("chainermn")
    communicator = communicator or chainermn.create_communicator("naive")
    return chainermn.create_multi_node_checkpointer("run", communicator, cp_interval=2, path=str(folder))


def _save_multi_node(state: Row, folder: Path, _: Any) -> None:
    _checkpointer(folder).save(_together(state), 1)


def _load_multi_node(state: Row, folder: Path) -> None:
    _checkpointer(folder).maybe_load(_together(state))


def _keep_multi_node(state: Row, folder: Path, count: int) -> None:
    checkpointer = _checkpointer(folder)
    for step in range(1, count + 1):
        checkpointer.save(_together(state), step)


# -- determinism


def pieces() -> list[str]:
    """Return what a run consists of; Chainer draws dropout from numpy's global generator."""
    return ["model", "optimizer", "scheduler", "framework rng", "python rng", "sampler"]


def saved_by_default() -> list[str]:
    """Return what ``training.extensions.snapshot`` holds of a trainer: updater, optimizer, extensions, iterator."""
    return ["model", "optimizer", "scheduler", "sampler"]


class Training:
    """A small network with dropout, momentum, a schedule, shuffled samples and noise on the images."""

    def __init__(self, task: Row) -> None:
        chainer = _chainer()
        chainer.global_config.cudnn_deterministic = True
        np.random.seed(task["seed"])
        random.seed(task["seed"])
        data = np.load(task["data"])
        self._x, self._y = data["x"], data["y"].astype(np.int32)
        self._batch, self._decay_every, self._seed = task["batch"], task["decay_every"], task["seed"]
        links, self._functions = chainer.links, chainer.functions
        side = self._x.shape[-1]
        self._model = chainer.ChainList(
            links.Convolution2D(1, 8, 3, pad=1), links.BatchNormalization(8), links.Linear(8 * side * side, 10)
        )
        self._optimizer = chainer.optimizers.MomentumSGD(lr=0.05).setup(self._model)
        self._scheduler = {"steps": 0}
        self._sampler = {"epoch": 0, "position": 0}

    def step(self, _: int) -> None:
        """Train on one mini-batch."""
        functions = self._functions
        chosen = next_samples(self._sampler, self._seed, len(self._x), self._batch)
        x = self._x[chosen] + np.float32(random.gauss(0, 0.1))
        convolution, norm, linear = self._model
        hidden = functions.dropout(functions.relu(norm(convolution(x))), 0.25)
        loss = functions.softmax_cross_entropy(linear(hidden), self._y[chosen])
        self._model.cleargrads()
        loss.backward()
        self._optimizer.update()
        self._scheduler["steps"] += 1
        self._set_rate()

    def _set_rate(self) -> None:
        self._optimizer.lr = 0.05 * 0.5 ** (self._scheduler["steps"] // self._decay_every)

    def save(self, path: Path) -> None:
        """Save every piece."""
        serializers = _chainer().serializers
        serializers.save_npz(f"{path}.model", self._model)
        serializers.save_npz(f"{path}.optimizer", self._optimizer)
        state: Any = np.random.get_state()
        name, keys, *rest = state
        content = {
            "scheduler": self._scheduler,
            "sampler": self._sampler,
            "framework rng": [name, keys.tolist(), *rest],
            "python rng": random.getstate(),
        }
        path.write_text(json.dumps(content))

    def load(self, path: Path, loaded: list[str]) -> None:
        """Load some pieces."""
        serializers = _chainer().serializers
        content = json.loads(path.read_text())
        if "model" in loaded:
            serializers.load_npz(f"{path}.model", self._model)
        if "optimizer" in loaded:
            serializers.load_npz(f"{path}.optimizer", self._optimizer)
        if "scheduler" in loaded:
            self._scheduler = content["scheduler"]
            self._set_rate()
        if "framework rng" in loaded:
            np.random.set_state(tuple(content["framework rng"]))
        if "python rng" in loaded:
            version, numbers, gauss = content["python rng"]
            random.setstate((version, tuple(numbers), gauss))
        if "sampler" in loaded:
            self._sampler = content["sampler"]

    def weights(self) -> list[Any]:
        """Return parameters and running averages."""
        content = _dictionary(self._model)
        return [content[name] for name in sorted(content)]


def next_samples(sampler: dict[str, int], seed: int, total: int, batch: int) -> Any:
    """Return the indices of the next mini-batch; the sampler moves on."""
    order = np.random.RandomState(seed + 1000 * sampler["epoch"]).permutation(total)
    chosen = order[sampler["position"] : sampler["position"] + batch]
    sampler["position"] += batch
    if sampler["position"] + batch > total:
        sampler["position"], sampler["epoch"] = 0, sampler["epoch"] + 1
    return chosen


# -- several workers


def share(task: Row) -> list[Row]:
    """Train with ChainerMN; save at the root, plainly, and at every rank with its multi-node checkpointer, which compresses."""
    chainer, chainermn = _chainer(), importlib.import_module("chainermn")
    comm = chainermn.create_communicator("naive")
    np.random.seed(task["seed"])
    model = chainer.ChainList(*map(_placed_layer, task["layers"]))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(), comm).setup(model)
    side, batch = task["side"], max(1, task["batch"] // comm.size)
    x = np.random.standard_normal((batch, 3, side, side)).astype(np.float32)
    y = np.random.randint(0, 10, batch).astype(np.int32)
    times_s = []
    for step in range(task["steps"] + 2):  # the first only makes the weights equal, the second warms up
        comm.mpi_comm.Barrier()
        start_s = time.perf_counter()
        loss = chainer.functions.softmax_cross_entropy(_forward(model, x), y)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if step > 1:
            times_s.append(time.perf_counter() - start_s)
    state = {"model": model, "optimizer": optimizer.actual_optimizer}
    rows = []
    for scheme in task["schemes"]:
        for repetition in range(task["slow_repetitions" if scheme == "rank" else "repetitions"]):
            row = _save_together(scheme, state, Path(task["folder"]) / scheme, comm)
            rows.append({"scheme": scheme, "repetition": repetition, "step_s": float(np.median(times_s)), **row})
    if task.get("keep"):
        for scheme in task["schemes"]:
            _save_together(scheme, state, Path(task["folder"]) / scheme, comm, keep=True)
        kept = importlib.import_module("measure").digest(values(state, whole=True))
        rows = [{**row, "sha256": kept} for row in rows]
    return rows if comm.rank == 0 else []


def load_together(task: Row, scheme: str, folder: Path, _: int) -> list[Any]:
    """Load as one of another number of workers; return every array."""
    chainer, chainermn = _chainer(), importlib.import_module("chainermn")
    comm = chainermn.create_communicator("naive")
    model = chainer.ChainList(*map(_placed_layer, task["layers"]))
    state = {"model": model, "optimizer": chainer.optimizers.MomentumSGD().setup(model)}
    if scheme == "rank":
        _checkpointer(folder, comm).maybe_load(_together(state))
    else:
        chainer.serializers.load_npz(str(folder / "run.0.1"), _together(state))
    return list(values(state, whole=True))


def _placed_layer(layer: Row) -> Any:
    links = _chainer().links
    if layer["kind"] == "linear":
        return links.Linear(layer["inputs"], layer["outputs"])
    sizes = (layer["inputs"], layer["outputs"], layer["kernel"])
    return links.Convolution2D(*sizes, stride=layer["stride"], pad=layer["padding"])


def _forward(model: Any, x: Any) -> Any:
    """Run AlexNet, or any such chain: images are pooled where AlexNet pools them."""
    functions = _chainer().functions
    layers = list(model)
    for place, layer in enumerate(layers):
        is_linear = not hasattr(layer, "stride")
        if is_linear and x.ndim == 4:
            x = functions.resize_images(x, (6, 6)) if layer.W.shape[1] == x.shape[1] * 36 else functions.mean(x, (2, 3))
        x = layer(x)
        if place + 1 < len(layers):
            x = functions.relu(x)
        if not is_linear and place in (0, 1, 4) and min(x.shape[2:]) > 3:
            x = functions.max_pooling_2d(x, 3, 2)
    return x


def _save_together(scheme: str, state: Row, folder: Path, comm: Any, keep: bool = False) -> Row:
    measure = importlib.import_module("measure")
    if comm.rank == 0:
        folder.mkdir(parents=True)
    comm.mpi_comm.Barrier()
    start_s = time.perf_counter()
    if scheme == "rank":
        _checkpointer(folder, comm).save(_together(state), 1)
        measure.sync_files(folder, f"run.{comm.rank}.")
    elif comm.rank == 0:
        _chainer().serializers.save_npz(str(folder / "run.0.1"), _together(state), compression=False)
        measure.sync_files(folder, "run.0.")
    own_s = time.perf_counter() - start_s
    comm.mpi_comm.Barrier()
    save_s = time.perf_counter() - start_s
    told = comm.mpi_comm.allgather((own_s, save_s))
    files = [path for path in folder.iterdir() if path.is_file()]
    size_bytes = sum(path.stat().st_size for path in files)
    comm.mpi_comm.Barrier()
    if comm.rank == 0 and not keep:
        shutil.rmtree(folder)
    waits_s = [whole - own for own, whole in told]
    longest_s = max(whole for _, whole in told)
    return {"save_s": longest_s, "wait_s": sum(waits_s) / comm.size, "bytes": size_bytes, "files": len(files)}
