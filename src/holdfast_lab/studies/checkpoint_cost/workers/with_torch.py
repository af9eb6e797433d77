"""PyTorch: ``torch.save`` of dictionaries, and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Row = dict[str, Any]


def versions() -> dict[str, str]:
    """Return the versions measured."""
    return {"torch": torch.__version__}


def make(task: Row, seed: int) -> Row:
    """Return a network of real layers and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(*map(_layer, task["layers"]))
    optimizer = _optimizer(task["optimizer"], model)
    if optimizer is not None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


def _layer(layer: Row) -> nn.Module:
    if layer["kind"] == "norm":
        return nn.BatchNorm2d(layer["outputs"])
    if layer["kind"] == "linear":
        return nn.Linear(layer["inputs"], layer["outputs"], bias=layer["bias"])
    return nn.Conv2d(layer["inputs"], layer["outputs"], layer["kernel"], bias=layer["bias"])


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def parameters(state: Row) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in state["model"].parameters())


def values(state: Row, whole: bool) -> Iterator[np.ndarray[Any, Any]]:
    """Yield every saved array."""
    content = gathered(state)
    for tensor in content["model"].values():
        yield tensor.numpy()
    for entries in content.get("optimizer", {}).get("state", {}).values() if whole else ():
        yield from (entry.numpy() for entry in entries.values() if isinstance(entry, torch.Tensor))


def gathered(state: Row) -> Row:
    """Return the dictionary that a script assembles by hand, as in the tutorials."""
    optimizer = state["optimizer"]
    content = {"model": state["model"].state_dict()}
    return content if optimizer is None else content | {"optimizer": optimizer.state_dict()}


def _scatter(state: Row, content: Row) -> None:
    state["model"].load_state_dict(content["model"])
    if state["optimizer"] is not None:
        state["optimizer"].load_state_dict(content["optimizer"])


def ways() -> dict[str, Any]:
    """Return the ways to save, by name."""
    way = importlib.import_module("measure").SaveMethod
    return {
        "pt": way(save=_save_pt, load=_load_pt, divided=True),
        "dcp": way(save=_save_dcp, load=_load_dcp),
        "dcp async": way(save=_save_dcp_async, load=_load_dcp, finish=_finish),
    }


def _save_pt(state: Row, folder: Path, meter: Any) -> None:
    with meter.part("gather"):
        content = gathered(state)
    with meter.file(folder / "checkpoint.pt") as file:
        torch.save(content, file)


def _load_pt(state: Row, folder: Path) -> None:
    _scatter(state, torch.load(folder / "checkpoint.pt", weights_only=True))


def _save_dcp(state: Row, folder: Path, meter: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with meter.part("gather"):
        content = gathered(state)
    save(content, checkpoint_id=folder, no_dist=True)


def _save_dcp_async(state: Row, folder: Path, meter: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    _one_process_group()
    with meter.part("gather"):
        content = gathered(state)
    state["future"] = async_save(content, checkpoint_id=folder)


def _one_process_group() -> None:
    """Create a process group of one process, which ``async_save`` requires."""
    if not torch.distributed.is_initialized():
        store: Any = getattr(torch.distributed, "HashStore")()  # noqa: B009 (it has no public type)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _finish(state: Row) -> None:
    state.pop("future").result()


def _load_dcp(state: Row, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    content = gathered(state)
    load(content, checkpoint_id=folder, no_dist=True)
    _scatter(state, content)


# -- determinism


def pieces() -> list[str]:
    """Return the pieces of a run's state."""
    return ["model", "optimizer", "scheduler", "framework rng", "python rng", "sampler"]


def saved_by_default() -> list[str]:
    """Return the pieces in ``model.state_dict()``, the tutorial's one line; no call saves more."""
    return ["model"]


def training(task: Row) -> TorchTraining:
    """Return a new training."""
    return TorchTraining(task)


class TorchTraining:
    """A small network with dropout, momentum, a schedule, shuffled samples and noise on the images."""

    def __init__(self, task: Row) -> None:
        torch.set_deterministic_debug_mode("error")
        torch.set_num_threads(1)
        torch.manual_seed(task["seed"])
        random.seed(task["seed"])
        data = np.load(task["data"])
        self._x, self._y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
        self._batch = task["batch"]
        self._seed = task["seed"]
        side = self._x.shape[-1]
        self._model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(8 * side * side, 10),
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05, momentum=0.9)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self._optimizer, task["decay_every"], 0.5)
        self._sampler = {"epoch": 0, "position": 0}

    def step(self, _: int) -> None:
        """Train on one mini-batch."""
        chosen = torch.from_numpy(next_samples(self._sampler, self._seed, len(self._x), self._batch))
        x = self._x[chosen] + random.gauss(0, 0.1)
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(x), self._y[chosen]).backward()
        self._optimizer.step()
        self._scheduler.step()

    def save(self, path: Path) -> None:
        """Save every piece."""
        version, numbers, gauss = random.getstate()
        content = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "framework rng": torch.get_rng_state(),
            "python rng": [version, list(numbers), gauss],
            "sampler": self._sampler,
        }
        torch.save(content, path)

    def load(self, path: Path, loaded: list[str]) -> None:
        """Load some pieces."""
        content = torch.load(path, weights_only=True)
        if "model" in loaded:
            self._model.load_state_dict(content["model"])
        if "optimizer" in loaded:
            rate = self._optimizer.param_groups[0]["lr"]
            self._optimizer.load_state_dict(content["optimizer"])
            if "scheduler" not in loaded:
                self._optimizer.param_groups[0]["lr"] = rate  # the rate belongs to the schedule, but both save it
        if "scheduler" in loaded:
            self._scheduler.load_state_dict(content["scheduler"])
            self._optimizer.param_groups[0]["lr"] = self._scheduler.get_last_lr()[0]
        if "framework rng" in loaded:
            torch.set_rng_state(content["framework rng"])
        if "python rng" in loaded:
            version, numbers, gauss = content["python rng"]
            random.setstate((version, tuple(numbers), gauss))
        if "sampler" in loaded:
            self._sampler = content["sampler"]

    def weights(self) -> list[np.ndarray[Any, Any]]:
        """Return parameters and buffers."""
        return [tensor.numpy() for tensor in self._model.state_dict().values()]


def next_samples(sampler: dict[str, int], seed: int, total: int, batch: int) -> np.ndarray[Any, Any]:
    """Return the indices of the next mini-batch, and advance the sampler."""
    order = np.random.RandomState(seed + 1000 * sampler["epoch"]).permutation(total)
    chosen = order[sampler["position"] : sampler["position"] + batch]
    sampler["position"] += batch
    if sampler["position"] + batch > total:
        sampler["position"], sampler["epoch"] = 0, sampler["epoch"] + 1
    return chosen


# -- several workers


def share(task: Row) -> list[Row]:
    """Train with DistributedDataParallel; save at the root, at every rank, and shared (DCP)."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task['rendezvous']}", rank=rank, world_size=world_size)
    torch.manual_seed(task["seed"])
    model = nn.parallel.DistributedDataParallel(_network(task))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    side, batch = task["side"], max(1, task["batch"] // world_size)
    x, y = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    times_s = []
    for _ in range(task["steps"] + 1):  # the first is a warm-up
        dist.barrier()
        start_s = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times_s.append(time.perf_counter() - start_s)
    state = {"model": model.module, "optimizer": optimizer}
    rows = []
    for repetition in range(task["repetitions"]):
        for scheme in task["schemes"]:
            folder = Path(task["folder"]) / scheme
            row = _save_together(scheme, state, folder, rank, world_size)
            rows.append(
                {
                    "scheme": scheme,
                    "repetition": repetition,
                    "step_s": sorted(times_s[1:])[len(times_s[1:]) // 2],
                    **row,
                }
            )
    if task.get("keep"):
        for scheme in task["schemes"]:
            _save_together(scheme, state, Path(task["folder"]) / scheme, rank, world_size, keep=True)
        kept = importlib.import_module("measure").digest(values(state, whole=True))
        rows = [{**row, "sha256": kept} for row in rows]
    dist.barrier()
    dist.destroy_process_group()
    return rows


def load_together(task: Row, scheme: str, folder: Path, rank: int) -> list[np.ndarray[Any, Any]]:
    """Load as a rank of another number of workers; return every array."""
    model = _network(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # DCP loads into an existing state
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    if scheme == "shared":
        _load_dcp(state, folder)
    elif scheme == "shared by holdfast":
        _scatter(state, importlib.import_module("holdfast.checkpoint").load(folder, 1).state)
    else:
        _scatter(state, torch.load(folder / f"run.{rank if scheme == 'rank' else 0}.1", weights_only=True))
    return list(values(state, whole=True))


def _network(task: Row) -> nn.Module:
    if task["model"] == "tiny":
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), pool, nn.Flatten(), nn.Linear(32, 10))
    # This file runs only where Holdfast is installed, which defines the network and its topology.
    make_model = importlib.import_module("holdfast_lab.workloads.models").make_model
    network: nn.Module = make_model(task["model"], seed=task["seed"])
    return network


def _save_together(scheme: str, state: Row, folder: Path, rank: int, world_size: int, keep: bool = False) -> Row:
    import torch.distributed as dist

    measure = importlib.import_module("measure")
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    start_s = time.perf_counter()
    if scheme == "shared":
        from torch.distributed.checkpoint.state_dict_saver import save

        save(gathered(state), checkpoint_id=folder)
        measure.sync_files(folder, f"__{rank}_")
    elif scheme == "shared by holdfast":
        _save_by_holdfast(state, folder, rank, world_size)
    elif scheme == "rank" or rank == 0:
        path = folder / f"run.{rank}.1"
        draft = path.with_name(path.name + ".tmp")
        torch.save(gathered(state), draft)
        measure.sync_files(folder, draft.name)
        draft.replace(path)
    own_s = time.perf_counter() - start_s
    dist.barrier()
    save_s = time.perf_counter() - start_s
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, (own_s, save_s))
    files = [path for path in folder.rglob("*") if path.is_file()]
    size_bytes = sum(path.stat().st_size for path in files)
    dist.barrier()
    if rank == 0 and not keep:
        shutil.rmtree(folder)
    waits_s = [whole - own for own, whole in told]
    return {
        "save_s": max(whole for _, whole in told),
        "wait_s": sum(waits_s) / world_size,
        "bytes": size_bytes,
        "files": len(files),
    }


def _save_by_holdfast(state: Row, folder: Path, rank: int, world_size: int) -> None:
    # This file runs only where Holdfast is installed; rank 0 waits for the other ranks' parts before it commits.
    checkpoint = importlib.import_module("holdfast.checkpoint")
    content = checkpoint.take(gathered(state), part=rank, parts=world_size)
    pending = checkpoint.write(folder, 1, content, {}, token="together")  # noqa: S106 (no password)
    if rank == 0:
        pending.commit(0)
