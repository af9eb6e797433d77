"""Detects this worker's platform, and handles workers on another platform (``Settings.require_same_platform``).

Under a strategy that promises exact results, a worker on another platform would break the promise: its gradients differ in the last
bits, and then everything does. All workers compare platforms in the rendezvous at the start; a newcomer compares its own with the
survivors' before it asks to join. Steps are not delayed.
"""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from holdfast.checkpoint.format import tensor_bytes
from holdfast.comm import broadcast_bytes
from holdfast.errors import ConfigError
from holdfast.records.types import WorkerRefused
from holdfast.state.context import JobContext
from holdfast.state.gpu_check import describe_gpu
from holdfast.state.gpu_platform import PROMISE, gpu_properties, line_of
from holdfast.state.hash_seed import hash_digest, warn_of_hashes
from holdfast.state.platform import Platform, PlatformDifference, between, difference, number_of, promises_bits

_LETTERS = 12


def platform_of_worker(device: torch.device | None = None) -> dict[str, str]:
    """Return this worker's platform under torch's current settings; see :data:`holdfast.state.platform.FIELDS`.

    Args:
        device: The device of the model. A GPU adds the properties of :mod:`holdfast.state.gpu_platform`.
    """
    flags = ", ".join(f"{name} {value}" for name, value in _flags().items())
    on_gpu = gpu_properties(describe_gpu(device)) if device is not None and device.type == "cuda" else {}
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
    } | on_gpu


@functools.cache
def cpu_model() -> str:
    """Return the vendor, family and model of this CPU, which distinguish it from CPUs whose arithmetic may differ.

    Raises:
        OSError: if this process may open no more files: without the answer it would seem to have another CPU.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except FileNotFoundError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wanted = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
    values = [fields[name] for name in wanted if name in fields]
    return " ".join(values) or platform.processor() or platform.machine()


def _flags() -> dict[str, str]:
    """Return the settings that a script may change and that determine bits."""
    tiny = torch.full((1,), 1e-38, dtype=torch.float32, device="cpu") * 1e-3  # a denormal number
    return {
        "mkldnn": "on" if torch.backends.mkldnn.enabled else "off",
        "deterministic": "on" if torch.are_deterministic_algorithms_enabled() else "off",
        "denormals": "kept" if tiny.item() else "flushed",
        "matmul": _matmul_precision(),
    }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the script has set torch's fp32_precision for each backend
        mkldnn: Any = torch.backends.mkldnn
        return f"{mkldnn.matmul.fp32_precision}/{torch.backends.cuda.matmul.fp32_precision}"


@functools.lru_cache(maxsize=8)
def _digest_of_kernels(threads: int, flags: str) -> str:
    """Return a digest of the results of a few kernels on fixed inputs; the arguments only serve as the cache's key."""
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


def promise_line(job: JobContext) -> str:
    """Return a line about what holds of this job's bits on GPUs; "" if none is used, or its settings promise no bits."""
    promise = job.platform.properties.get(PROMISE, "")
    return line_of(promise) if promise and _promises(job) else ""


# -- handling differences


def compare_platforms(job: JobContext) -> None:
    """Check, together with all members, that all run on the same platform, or report that exactness is lost.

    Raises:
        ConfigError: at all members, if platforms differ and the job promises exact results.
    """
    comm = job.comm
    if len(comm.processes) == 1:
        return
    number, hashes = number_of(job.platform.properties), hash_digest()
    high, low, high_hash, low_hash = comm.maximum((number, ~number, hashes, ~hashes))
    if high_hash != ~low_hash:
        warn_of_hashes(job)
    job.platform.differs = high != ~low
    if not job.platform.differs:
        return
    message = json.dumps(job.platform.properties).encode()
    platforms: dict[int, Platform] = {rank: json.loads(broadcast_bytes(comm, message, rank)) for rank in comm.members}
    mismatch = difference(platforms)
    if mismatch is None:
        return
    if _refuses(job):
        raise ConfigError(
            f"{mismatch.what}: their bits would differ; {mismatch.advice}, or allow it with --no-require-same-platform"
        )
    _give_up(job, mismatch, aloud=job.is_lead)


def compare_with_others(job: JobContext) -> None:
    """Check, as a newcomer that has not joined yet, that this worker is on the survivors' platform.

    Raises:
        SystemExit: with code 0, if it is not and the job promises exact results: a replacement here would have the same platform.
        StoreLost: if the membership store is lost.
    """
    me = job.comm.local_ranks[0]
    peer_platform = json.loads(job.comm.wanted_platform() or "{}").get("platform")
    mismatch = (
        None
        if peer_platform is None
        else between(job.platform.properties, peer_platform, worker=f"worker {me} has", others="the others")
    )
    if mismatch is None:
        return
    if not _refuses(job):
        _give_up(job, mismatch)
        return
    why = f"{mismatch.what}: it may not join, its bits would differ; {mismatch.advice}, or allow it with --no-require-same-platform"
    job.log.write(WorkerRefused(step=-1, why=why, platform=job.platform.properties))
    job.warn(why)
    raise SystemExit(0)


def _refuses(job: JobContext) -> bool:
    return job.settings.require_same_platform and _promises(job)


def _promises(job: JobContext) -> bool:
    return promises_bits(job.live.strategy, job.settings.split, job.settings.batch)


def compare_with_checkpoint(job: JobContext, theirs: Platform) -> None:
    """Warn if the checkpoint to resume from was written on another platform; it is never refused."""
    me = job.comm.local_ranks[0]
    mismatch = (
        between(job.platform.properties, theirs, worker=f"worker {me} has", others="the writer of the checkpoint")
        if theirs
        else None
    )
    if mismatch is not None:
        _give_up(job, mismatch, aloud=job.is_lead)


def warn_of_samples(job: JobContext, *, joins: bool) -> None:
    """Warn that a loop continues with other samples than those of the checkpoint, or of the workers that this one joins.

    With exact results promised, it is recorded.
    """
    phrase = "the other workers have" if joins else "the checkpoint was made with"
    text = f"not exact: the data of this loop are not those that {phrase}"
    if (job.is_lead or joins) and text != job.platform.given_up:
        job.warn(text)
    job.platform.given_up = text if _promises(job) else ""


def _give_up(job: JobContext, found: PlatformDifference, *, aloud: bool = True) -> None:
    """Warn once that platforms differ; if exact results were promised, record it as well."""
    promised = _promises(job)
    text = f"not exact: {found.what}" if promised else f"{found.what}: their bits differ"
    if aloud and text != job.platform.given_up:
        job.warn(text)
    job.platform.given_up = text if promised else ""
