"""Which kind of worker this one is, and what is done about one of another kind (``Settings.kinds``).

Under a strategy that promises bits a worker of another kind would break the promise: its gradients differ in their last bits, and
everything after them. All compare themselves where they meet at the start; who comes later compares itself with those who are
there before it asks to be let in. Nothing of it is on a step's way.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from holdfast.checkpoint.format import tensor_bytes
from holdfast.comm import share_bytes
from holdfast.errors import ConfigError
from holdfast.records.types import WorkerRefused
from holdfast.state.platform import Difference, Kind, between, difference, number_of, promises_bits

if TYPE_CHECKING:
    from holdfast.engine.context import World

_LETTERS = 12


def kind_of_worker() -> dict[str, str]:
    """Return the kind of this worker, as torch is set just now; see :data:`holdfast.state.platform.FIELDS`."""
    flags = ", ".join(f"{name} {value}" for name, value in _flags().items())
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_model(),
        "gpu": ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
        if torch.cuda.is_initialized()
        else "",
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "threads": str(torch.get_num_threads()),
        "flags": flags,
        "kernels": _digest_of_kernels(torch.get_num_threads(), flags),
    }


@functools.cache
def cpu_model() -> str:
    """Return what distinguishes this CPU from others whose arithmetic may take another path: vendor, family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wanted = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
    found = [said[name] for name in wanted if name in said]
    return " ".join(found) or platform.processor() or platform.machine()


def _flags() -> dict[str, str]:
    """Return what a script may set that decides bits."""
    tiny = torch.full((1,), 1e-38, dtype=torch.float32, device="cpu") * 1e-3  # too small for a normal number
    return {
        "mkldnn": "on" if torch.backends.mkldnn.enabled else "off",
        "deterministic": "on" if torch.are_deterministic_algorithms_enabled() else "off",
        "denormals": "kept" if tiny.item() else "flushed",
        "matmul": _matmul_precision(),
    }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the script has set torch's fp32_precision, which each backend has
        mkldnn: Any = torch.backends.mkldnn
        return f"{mkldnn.matmul.fp32_precision}/{torch.backends.cuda.matmul.fp32_precision}"


@functools.lru_cache(maxsize=8)
def _digest_of_kernels(threads: int, flags: str) -> str:
    """Return a digest of what a few kernels make of fixed numbers; the arguments let a change be noticed on which it may depend."""
    generator = torch.Generator("cpu").manual_seed(20)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.no_grad():
        matrix, long = noise(37, 129) @ noise(129, 65), noise(1027)
        results = (
            matrix,
            F.conv2d(noise(3, 5, 17, 19), noise(7, 5, 3, 3), padding=1),
            long.exp(),
            long.tanh(),
            long.softmax(0),
            F.layer_norm(matrix, (65,)),
            noise(10_007).sum(),
            _adam_step(long, noise(1027)),
        )
    return xxhash.xxh3_64_hexdigest(b"".join(map(tensor_bytes, results)))[:_LETTERS]


def _adam_step(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    mean = torch.zeros_like(weight).lerp_(gradient, 0.1)
    square = torch.zeros_like(weight).addcmul_(gradient, gradient, value=0.001)
    return weight.addcdiv(mean, square.sqrt().div_(0.0316).add_(1e-8), value=-0.01)


# -- what is done about it


def compare_kinds(world: World) -> None:
    """Make sure, with all members, that they are of one kind, or say what is given up.

    Raises:
        ConfigError: at all members, if they are not and the job promises bits.
    """
    comm = world.comm
    if len(comm.processes) == 1:
        return
    number = number_of(world.platform.kind)
    high, low = comm.maximum((number, ~number))
    if high == ~low:
        return
    mine = json.dumps(world.platform.kind).encode()
    kinds: dict[int, Kind] = {rank: json.loads(share_bytes(comm, mine, rank)) for rank in comm.members}
    found = difference(kinds)
    if found is None:
        return
    if _refuses(world):
        raise ConfigError(f"{found.what}: their bits would differ; {found.advice}, or allow it with --kinds any")
    _give_up(world, found, aloud=world.is_lead)


def compare_with_others(world: World) -> None:
    """Make sure, as a newcomer that nobody counts on yet, that this worker is of the others' kind.

    Raises:
        SystemExit: with code 0, if it is not and the job promises bits: nobody else could take its place from here.
        StoreLost: if the store is.
    """
    me = world.comm.here[0]
    theirs = json.loads(world.comm.wanted_kind() or "null")
    found = (
        None if theirs is None else between(world.platform.kind, theirs, who=f"worker {me} has", others="the others")
    )
    if found is None:
        return
    if not _refuses(world):
        _give_up(world, found)
        return
    why = f"{found.what}: it is not taken in, its bits would differ; {found.advice}, or allow it with --kinds any"
    world.log.write(WorkerRefused(step=-1, why=why, kind=world.platform.kind))
    _say(world, why)
    raise SystemExit(0)


def _refuses(world: World) -> bool:
    return world.settings.kinds == "same" and _promises(world)


def _promises(world: World) -> bool:
    return promises_bits(world.live.strategy, world.settings.split, world.settings.batch)


def compare_with_checkpoint(world: World, theirs: Kind) -> None:
    """Say so if a checkpoint that is gone on from was made by workers of another kind: it is refused nowhere."""
    me = world.comm.here[0]
    found = (
        between(world.platform.kind, theirs, who=f"worker {me} has", others="who made the checkpoint")
        if theirs
        else None
    )
    if found is not None:
        _give_up(world, found, aloud=world.is_lead)


def _give_up(world: World, found: Difference, *, aloud: bool = True) -> None:
    """Say once that workers differ; where bits were promised, write it down as well."""
    promised = _promises(world)
    text = f"not exact: {found.what}" if promised else f"{found.what}: their bits differ"
    if aloud and text != world.platform.given_up:
        _say(world, text)
    world.platform.given_up = text if promised else ""


def _say(world: World, text: str) -> None:
    sys.stderr.write(f"holdfast: worker {world.comm.here[0]}: {text}\n")
    sys.stderr.flush()
