"""The kind of a worker: what decides its bits beside the script. Pure: how one is found out stands in ``state/platform_check.py``.

Workers of one kind compute the same bits from the same slice. A kind is text by name, so that it can be sent, written down, and
compared by people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.recovery.registry import strategy_class

Kind = Mapping[str, str]
_CAPABILITIES = ("default", "avx2", "avx512")
"""What ``ATEN_CPU_CAPABILITY`` can ask for, the least first."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One thing that decides bits."""

    words: str  # what it is called where two differ
    advice: str  # what to do then


FIELDS = {
    "capability": _Field("CPU capability", ""),  # what to set depends on what there is
    "cpu": _Field("CPU", "start them on machines with CPUs of one kind"),
    "gpu": _Field("GPU", "start them on machines with GPUs of one kind"),
    "torch": _Field("torch", "install the same torch everywhere"),
    "numpy": _Field("NumPy", "install the same NumPy everywhere: samples may be drawn with it"),
    "python": _Field("Python", "install the same Python everywhere: samples may be drawn with its random"),
    "threads": _Field("number of threads", "set OMP_NUM_THREADS to the same number everywhere"),
    "flags": _Field("flags of torch", "set the same everywhere"),
    "kernels": _Field("results of the same kernels", "look for MKL_* and ONEDNN_* in their environments"),
}
"""What a kind is made of; where two differ in several, the first says most."""


def promises_bits(strategy: str, split: str, batch: str) -> bool:
    """Return whether a job with these settings ends with the same bits whatever happens to its workers."""
    return strategy_class(strategy).exact and split == "slices" and batch == "global"


def number_of(kind: Kind) -> int:
    """Return 62 bits that are the same for the same kind, to be compared among many at once."""
    text = json.dumps(dict(sorted(kind.items()))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class Difference:
    """How some workers differ from the rest."""

    what: str  # `worker 3 has CPU capability AVX2, the others AVX512`
    advice: str  # what to do about it


def difference(kinds: Mapping[int, Kind]) -> Difference | None:
    """Return how the fewer workers that are of another kind differ from the most; None if all are of one kind.

    Of several other kinds that of the lowest worker is named.
    """
    usual = _most(kinds)
    odd = next((kinds[rank] for rank in sorted(kinds) if kinds[rank] != usual), None)
    if odd is None:
        return None
    alike, others = ([rank for rank in sorted(kinds) if kinds[rank] == kind] for kind in (odd, usual))
    return between(
        odd,
        usual,
        who=f"worker {alike[0]} has" if len(alike) == 1 else f"workers {', '.join(map(str, alike))} have",
        others=f"worker {others[0]}" if len(kinds) == 2 else "the others",
    )


def between(mine: Kind, theirs: Kind, *, who: str, others: str) -> Difference | None:
    """Return how ``mine`` differs from ``theirs``, None if it does not. What an older version did not write down does not count.

    ``who`` and ``others`` say whose they are, as ``"worker 3 has"`` and ``"the others"``.
    """
    known = [name for name in FIELDS if name in mine and name in theirs]
    name = next((name for name in known if mine[name] != theirs[name]), None)
    if name is None:
        return None
    values = mine[name] or "none", theirs[name] or "none"
    return Difference(f"{who} {FIELDS[name].words} {values[0]}, {others} {values[1]}", _advice(name, values))


def _most(kinds: Mapping[int, Kind]) -> Kind:
    """Return the kind that most have; of two that as many have, the one that the lowest worker has."""
    ranks = sorted(kinds)
    return max((kinds[rank] for rank in ranks), key=lambda kind: sum(kinds[rank] == kind for rank in ranks))


def _advice(name: str, values: tuple[str, str]) -> str:
    if name != "capability":
        return FIELDS[name].advice
    known = [value.lower() for value in values]
    least = next((word for word in _CAPABILITIES if word in known), "default")
    return f"set ATEN_CPU_CAPABILITY={least} everywhere"
