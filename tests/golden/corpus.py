"""In the tree under test, over ``holdfast.checkpoint`` alone: writes checkpoints of every format and dtype, and loads what lies in a folder.

corpus.py write DIR
corpus.py load CORPUS FOLDER...
"""

import hashlib
import json
import sys
from pathlib import Path

import h5py
import numpy as np
import safetensors.torch
import torch

from holdfast import checkpoint

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
INFO = {"words": "a b", "number": 7, "list": [1, 2.5, None, True]}


def state():
    """Tensors of every dtype, an empty one, a scalar, a tie, and values beside them."""
    made = {str(dtype).removeprefix("torch."): _numbers(dtype, seed) for seed, dtype in enumerate(DTYPES)}
    nested = {
        "list": [torch.arange(3), {"deep": torch.tensor(1.5)}],
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12).reshape(3, 4).T,
    }
    return {
        "tensors": made,
        "nested": nested,
        "tied": made["float32"],
        "number": 3,
        "text": "x",
        "none": None,
        "float": 0.1,
    }


def _numbers(dtype, seed):
    drawn = torch.randint(0, 100, (5, 7), generator=torch.Generator().manual_seed(seed))
    return drawn > 50 if dtype is torch.bool else drawn.to(dtype)


def write(folder):
    """Write one checkpoint a format, of one writer and of two, and a file of each other program."""
    for form in checkpoint.FORMATS:
        place = checkpoint.CheckpointStore(folder / f"api-{form}" / "checkpoints", form)
        place.write_tensors(3, state(), INFO).commit(0)
        if form == "dcp":  # which has one writer
            continue
        pending = [place.write(5, checkpoint.take(state(), part, 2), INFO, "both") for part in range(2)]
        pending[0].commit(1)
    tensors = state()["tensors"]
    numbers = {name: tensor.numpy() for name, tensor in tensors.items() if name != "bfloat16"}
    foreign = folder / "foreign"
    foreign.mkdir()
    torch.save({"model": tensors, "epoch": 3}, foreign / "a.pt")
    safetensors.torch.save_file(tensors, foreign / "a.safetensors")
    np.savez(foreign / "a.npz", **numbers)
    with h5py.File(foreign / "a.h5", "w") as file:
        for name, values in numbers.items():
            file[f"model/{name}"] = values


def load(folder):
    """Return digests of all that each step of a folder holds."""
    found = {}
    for step in checkpoint.steps(folder):
        loaded = checkpoint.load(folder, step)
        values = dict(_digests(loaded.state, ""))
        found[step] = {
            "values": len(values),
            "sha256": _digest(sorted(values.items())),
            "info": _digest(sorted(_plain(loaded.info))),
        }
    return {"steps": found, "newest": checkpoint.newest_intact(folder)}


def _digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _plain(info):
    """Leave out what says when: ``job`` numbers a job by the clock, and ``token`` a start of it."""
    return (
        f"{name}={_without_job(value)}"
        for name, value in info.items()
        if name not in ("written_s", "versions", "token")
    )


def _without_job(value):
    return {k: v for k, v in value.items() if k != "job"} if isinstance(value, dict) else value


def _digests(value, path):
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        yield path, f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    elif isinstance(value, dict):
        for name in value:
            yield from _digests(value[name], f"{path}/{name}")
    elif isinstance(value, list | tuple):
        yield path, f"{type(value).__name__} of {len(value)}"
        for number, each in enumerate(value):
            yield from _digests(each, f"{path}/{number}")
    else:
        yield path, repr(value)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", folder]:
            write(Path(folder))
            print("{}")
        case ["load", corpus, *folders]:
            print(json.dumps({folder: load(Path(corpus) / folder) for folder in folders}))
