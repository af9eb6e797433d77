"""Shared by tests of checkpoints: states of every kind, bitwise comparison, and altering files on disk."""

import json
import os
import struct
from pathlib import Path

import torch
import xxhash

from holdfast.checkpoint import read_manifest, take, write
from holdfast.checkpoint.format import DTYPES, tensor_bytes


def plain_bytes(tensor):
    """The values as bytes in row-major order, whatever the strides."""
    return bytes(tensor_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()))


def same(a, b):
    """Bit-identical, including the types."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and plain_bytes(a) == plain_bytes(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


def any_bits(dtype, shape, seed=0):
    """A tensor of arbitrary bits, including NaNs with a payload; a bool has only two values."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw[..., 0] > 127 if dtype is torch.bool else raw.view(dtype).reshape(shape)


def every_dtype(shape=(3, 5)):
    """A state with a tensor of each dtype."""
    return {name: any_bits(dtype, shape, seed) for seed, (name, dtype) in enumerate(DTYPES.items())}


def save_parts(root, step, states, info=None, token="parts", committer=0, generation=0):  # noqa: S107 - no password
    """Save as several writers, each with its own view of the state."""
    parts = len(states)
    pending = [
        write(root, step, take(state, i, parts), info or {}, token=token if parts > 1 else "")
        for i, state in enumerate(states)
    ]
    return pending[committer].commit(generation, wait_s=0)


def step_dir(root, step):
    return Path(root) / f"step-{step:08d}"


def manifest_file(root, step):
    return step_dir(root, step) / "manifest.json"


def data_dir(root, step):
    return step_dir(root, step) / read_manifest(root, step).folder


def data_files(root, step):
    return sorted(data_dir(root, step).iterdir())


def all_names(root):
    """Every file and folder, relative to the root."""
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


def flip(path, position, mask=1):
    """Change bits of one byte in place; a second time changes them back."""
    with open(path, "r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        at = file.tell()
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def sealed(text):
    """``text`` with a valid digest, so that only its content can be wrong."""
    body = text.rstrip().removesuffix("}").rstrip().encode("utf-8", "surrogatepass") + b",\n"
    return body + f'"xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def seal(fields):
    return sealed(json.dumps({name: value for name, value in fields.items() if name != "xxh3"}))


def fields_of(root, step):
    """The manifest as plain JSON, to be altered."""
    return json.loads(manifest_file(root, step).read_bytes())


def lie(root, step, change):
    """Alter the manifest and recompute its digest."""
    fields = fields_of(root, step)
    change(fields)
    manifest_file(root, step).write_bytes(seal(fields))
