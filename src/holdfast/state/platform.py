"""A worker's platform: everything besides the script that determines result bits. Pure; ``state/platform_check.py`` detects it.

Workers on the same platform compute the same bits from the same slice. A platform maps names to text, so that it can be sent, recorded
and compared by people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.recovery.registry import strategy_class

Platform = Mapping[str, str]
_CAPABILITIES = ("default", "avx2", "avx512")
"""Values of ``ATEN_CPU_CAPABILITY``, in ascending order."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One property that determines bits."""

    words: str  # its name in messages
    advice: str  # what to do about a difference


FIELDS = {
    "capability": _Field("CPU capability", ""),  # the advice depends on the values
    "cpu": _Field("CPU", "start all workers on machines with the same CPU model"),
    "gpu": _Field("GPU", "start all workers on machines with the same GPU model"),
    "gpu_driver": _Field("GPU driver", "install the same GPU driver everywhere"),
    "gpu_libraries": _Field("GPU libraries", "install the same torch with the same libraries for GPUs everywhere"),
    "gpu_flags": _Field("GPU flags", "set the same flags, and CUBLAS_WORKSPACE_CONFIG, everywhere"),
    "torch": _Field("torch", "install the same torch everywhere"),
    "numpy": _Field("NumPy", "install the same NumPy everywhere: samples may be drawn with it"),
    "python": _Field("Python", "install the same Python everywhere: samples may be drawn with its random"),
    "threads": _Field("number of threads", "set OMP_NUM_THREADS to the same number everywhere"),
    "flags": _Field("flags of torch", "set the same flags everywhere"),
    "kernels": _Field("results of the same kernels", "look for MKL_* and ONEDNN_* in their environments"),
}
"""The properties of a platform; of several differences, the first one listed here is reported."""


def promises_bits(strategy: str, split: str, batch: str) -> bool:
    """Return whether a job with these settings ends with the same bits whatever happens to its workers."""
    return strategy_class(strategy).exact and split == "slices" and batch == "global"


def number_of(platform: Platform) -> int:
    """Return a 62-bit digest of a platform, by which many workers compare theirs in one reduction."""
    text = json.dumps(dict(sorted(platform.items()))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class PlatformDifference:
    """How some workers' platform differs from that of the rest."""

    what: str  # `worker 3 has CPU capability AVX2, the others AVX512`
    advice: str  # what to do


def difference(platforms: Mapping[int, Platform]) -> PlatformDifference | None:
    """Return how the platform of a minority of the workers differs from the most common one; None if all are the same.

    If there are several other platforms, that of the lowest worker is reported.
    """
    usual = _most(platforms)
    odd = next((platforms[rank] for rank in sorted(platforms) if platforms[rank] != usual), None)
    if odd is None:
        return None
    minority, majority = ([rank for rank in sorted(platforms) if platforms[rank] == kind] for kind in (odd, usual))
    return between(
        odd,
        usual,
        worker=f"worker {minority[0]} has" if len(minority) == 1 else f"workers {', '.join(map(str, minority))} have",
        others=f"worker {majority[0]}" if len(platforms) == 2 else "the others",
    )


def between(mine: Platform, theirs: Platform, *, worker: str, others: str) -> PlatformDifference | None:
    """Return how ``mine`` differs from ``theirs``, or None. A property that only one of them has is ignored.

    ``worker`` and ``others`` name the owners in the message, as in ``"worker 3 has"`` and ``"the others"``.
    """
    names = [name for name in FIELDS if name in mine and name in theirs]
    name = next((name for name in names if mine[name] != theirs[name]), None)
    if name is None:
        return None
    values = mine[name] or "none", theirs[name] or "none"
    return PlatformDifference(f"{worker} {FIELDS[name].words} {values[0]}, {others} {values[1]}", _advice(name, values))


def _most(platforms: Mapping[int, Platform]) -> Platform:
    """Return the most common platform; on a tie, that of the lowest worker."""
    ranks = sorted(platforms)
    return max((platforms[rank] for rank in ranks), key=lambda kind: sum(platforms[rank] == kind for rank in ranks))


def _advice(name: str, values: tuple[str, str]) -> str:
    if name != "capability":
        return FIELDS[name].advice
    capabilities = [value.lower() for value in values]
    least = next((word for word in _CAPABILITIES if word in capabilities), "default")
    return f"set ATEN_CPU_CAPABILITY={least} everywhere"
