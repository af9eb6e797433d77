"""Random numbers of the job, seeded by what is computed, never by which worker computes it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch


def seed_of(*parts: int | str) -> int:
    """Return a 32-bit seed that depends on all ``parts``.

    32 bits, because torch's CPU generator keeps only the low 32 bits of a seed: keys must be hashed, not packed.
    """
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def order_of(seed: int, epoch: int, num_samples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the order of samples in ``epoch``, a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed_of("order", seed, epoch))
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = torch.randperm(num_samples, generator=generator).numpy()
    return order


@functools.cache
def _seed_torch() -> Callable[[int], object]:
    """Return the function that seeds torch: all devices if there is an accelerator, which takes a hundred times longer."""
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def seed_slice(seed: int, step: int, slice_: int, *part: int) -> None:
    """Seed the global generators of torch, NumPy and Python for one slice of one step, in one part of a split model."""
    _seed_all(seed_of("slice", seed, step, slice_, *part))


def _seed_all(key: int) -> None:
    _seed_torch()(key)
    np.random.seed(key)  # the global generator, which datasets use for augmentation
    random.seed(key)


@contextlib.contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the global generators with 32 bits temporarily, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()
    on_gpus = _gpu_states()
    _seed_all(key)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        _set_gpu_states(on_gpus)
        np.random.set_state(before[1])
        random.setstate(before[2])


def _gpu_states() -> list[torch.Tensor]:
    """Return the states of torch's generators of all visible GPUs; empty if this process uses none.

    They are in the memory of the CPU, so reading them waits for no GPU.
    """
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def _set_gpu_states(states: Sequence[torch.Tensor]) -> None:
    """Restore generators of GPUs; those of GPUs that this process does not see are ignored."""
    if states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(list(states[: torch.cuda.device_count()]))


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators of torch, NumPy and Python, as plain data; of GPUs, if they are used.

    Bytes are hexadecimal strings: unlike tensors, these are not divided among the writers of a checkpoint.
    """
    name, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    on_gpus = [_hex(state) for state in _gpu_states()]
    return {
        "torch": _hex(torch.get_rng_state()),
        "numpy": {
            "name": str(name),
            "key": np.asarray(key, dtype="<u4").tobytes().hex(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {
            "version": version,
            "words": np.asarray(words, dtype="<u4").tobytes().hex(),
            "next_gauss": next_gauss,
        },
    } | ({"cuda": on_gpus} if on_gpus else {})


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore the global generators from :func:`generator_states`."""
    torch.set_rng_state(_from_hex(states["torch"]))
    _set_gpu_states([_from_hex(state) for state in states.get("cuda", ())])
    numpy, python = states["numpy"], states["python"]
    key = np.frombuffer(bytes.fromhex(numpy["key"]), dtype="<u4")
    np.random.set_state((numpy["name"], key, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    words = np.frombuffer(bytes.fromhex(python["words"]), dtype="<u4")
    random.setstate((python["version"], tuple(int(word) for word in words), python["next_gauss"]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
