"""The state of one training process: its tensors by path, and the HDF5 file that holds them.

=============================  ==========================================================
path                           content
=============================  ==========================================================
``model/NAME``                 a parameter or a buffer of this process's part of the model
``optimizer/NAME/KEY``         a tensor that the optimizer keeps for that parameter
``rng``                        the state of torch's generator
``rest``                       JSON: epoch, optimizer settings, learning-rate schedule
=============================  ==========================================================

The sample order follows from the epoch. Alterations change only floating-point tensors under ``model`` and
``optimizer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.checkpoint.format import tensor_bytes
from holdfast.tools.formats.hdf5 import Hdf5
from holdfast.tools.formats.kinds import open_imported
from holdfast_lab.studies.soft_errors.workers.platforms import ModelPlatform


def tensors_of(platform: ModelPlatform, target: str) -> dict[str, Tensor]:
    """Return the floating-point tensors of the ``model`` or the ``optimizer`` by path, in file order.

    They share memory with the training.
    """
    found = {path: tensor for path, tensor in _tensors(platform).items() if path.startswith(f"{target}/")}
    return {path: found[path] for path in sorted(found, key=_parts) if found[path].is_floating_point()}


def write_state(platform: ModelPlatform, epoch: int, path: Path) -> None:
    """Write the state to an HDF5 file.

    Args:
        platform: The training whose state is written.
        epoch: The next epoch.
        path: The file, ending with ``.h5``.
    """
    rest = {
        "epoch": epoch,
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in platform.optimizer.param_groups
        ],
        "scheduler": platform.scheduler.state_dict(),
    }
    tensors = {
        **{path: tensor.contiguous() for path, tensor in _tensors(platform).items()},
        "rng": torch.get_rng_state(),
        "rest": torch.tensor(list(json.dumps(rest).encode()), dtype=torch.uint8),
    }
    layout = Hdf5().lay_out(path.parent, path.stem, tensors)
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            file.seek(layout.places[name][1])
            file.write(tensor_bytes(tensor))


def read_state(platform: ModelPlatform, path: Path) -> int:
    """Load the state from an HDF5 file of :func:`write_state`, with any alterations made since.

    Return the next epoch.
    """
    with open_imported(path) as source:
        found = {name: source.read(name) for name in source.tensors}
    rest = json.loads(bytes(found.pop("rest").tolist()))
    torch.set_rng_state(found.pop("rng"))
    with torch.no_grad():
        for name, tensor in platform.module.state_dict().items():
            tensor.copy_(found[f"model/{name}"])
    for name, parameter in platform.module.named_parameters():
        begin = f"optimizer/{name}/"
        mine = {path.removeprefix(begin): tensor for path, tensor in found.items() if path.startswith(begin)}
        if mine:
            platform.optimizer.state[parameter] = mine
    for group, settings in zip(platform.optimizer.param_groups, rest["groups"], strict=True):
        group.update(settings)
    platform.scheduler.load_state_dict(rest["scheduler"])
    return int(rest["epoch"])


def _parts(path: str) -> list[str]:
    return path.split("/")


def _tensors(platform: ModelPlatform) -> dict[str, Tensor]:
    model = {f"model/{name}": tensor for name, tensor in platform.module.state_dict().items()}
    names = {parameter: name for name, parameter in platform.module.named_parameters()}
    states: Mapping[Any, Mapping[str, Any]] = platform.optimizer.state
    kept = {
        f"optimizer/{names[parameter]}/{key}": value
        for parameter, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return model | kept
