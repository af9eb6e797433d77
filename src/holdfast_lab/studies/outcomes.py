"""What became of a training that was disturbed: its class, whether its bits are others, and how far each layer is off.

=======  =============================================================================================
class    what happened
=======  =============================================================================================
RWC      restart without change: the accuracy is within a limit of that of the undisturbed run
AccR     accuracy reduction: it is below by more than the limit
NaN      collapse: a loss or a weight is not a finite number
TF       training failed without that: it raised, or its process died of it
=======  =============================================================================================

Source:
    E. Rojas, D. Perez, E. Meneses, "A characterization of soft-error sensitivity in data-parallel and model-parallel
    distributed deep learning", Journal of Parallel and Distributed Computing, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import xxhash
from torch import Tensor

from holdfast.checkpoint.format import tensor_bytes

RWC, ACCR, NAN, TF = "RWC", "AccR", "NaN", "TF"
OUTCOMES = (RWC, ACCR, NAN, TF)
LIMIT = 0.05
"""The paper's: a drop of "more than 5 %". Whether of the accuracy or in points it leaves open, as far as we know it."""


def outcome_of(
    accuracy: float,
    undisturbed: float,
    *,
    finite: bool,
    limit: float = LIMIT,
    drop: Literal["points", "relative"] = "points",
) -> str:
    """Return the class of a training that ended by itself: RWC, AccR or NaN.

    Args:
        accuracy: At its end, from 0 to 1.
        undisturbed: That of the undisturbed run, from 0 to 1.
        finite: Whether all losses and weights are finite; see :func:`are_finite`.
        limit: The largest drop that is no change, ``>= 0``.
        drop: What the limit is a share of: 1 ("points": 0.93 to 0.88 is a drop of 0.05), or the undisturbed accuracy
            ("relative": that is one of 0.054).
    """
    if not finite:
        return NAN
    whole = 1.0 if drop == "points" else undisturbed
    # The last digits are those of rounding: a drop of exactly the limit is no change.
    return ACCR if undisturbed - accuracy > limit * whole + 1e-9 else RWC


def are_finite(losses: Iterable[float], tensors: Iterable[Tensor]) -> bool:
    """Return whether no loss and no value of the tensors is infinite or NaN."""
    return all(map(math.isfinite, losses)) and all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hexadecimal digits that depend on every bit, shape, dtype and name: equal if the states are bit-equal.

    Unlike ``==`` it tells 0 from -0, and one NaN from another.
    """
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor_bytes(tensor.contiguous()))
    return whole.hexdigest()


def relative_error(undisturbed: Tensor, disturbed: Tensor) -> Tensor:
    """Return (A2 - A1) / |A1| for each value, in float64; A1 is undisturbed.

    Where A1 is 0 there is no such number: it is 0 where A2 is 0, too, and infinite with the sign of A2 elsewhere. NaN
    where A1 is not finite, or A2 is NaN.
    """
    a1, a2 = undisturbed.detach().to(torch.float64), disturbed.detach().to(torch.float64)
    error = (a2 - a1) / a1.abs()
    return torch.where((a1 == 0) & (a2 == 0), torch.zeros_like(error), error)


def layer_errors(
    undisturbed: Mapping[str, Tensor], disturbed: Mapping[str, Tensor]
) -> dict[str, dict[str, float | None]]:
    """Return how far each layer of two models is apart, by its name: what stands before the last dot of its tensors' names.

    Args:
        undisturbed: Tensors by name; those of whole numbers are left out.
        disturbed: Tensors of the same names and shapes.

    Returns:
        ``values`` and how many of them are ``changed``, ``from_zero`` (A1 is 0, A2 is not) and ``not_finite`` (no finite
        number can be given for another reason); over the rest, ``mean``, ``median`` and ``max`` of the absolute relative
        error, None if there is no rest; and ``norm``, the norm of A2 - A1 over that of A1, of finite values, which
        zeros do not disturb, None if A1 is 0.

    Source:
        The relative error: Rojas, Perez, Meneses (2024), as above. What is done about zeros is ours.
    """
    layers: dict[str, list[str]] = {}
    for name, tensor in undisturbed.items():
        if tensor.is_floating_point():
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    return {layer: _error(_joined(undisturbed, names), _joined(disturbed, names)) for layer, names in layers.items()}


def _joined(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].detach().to(torch.float64).reshape(-1) for name in names])


def _error(a1: Tensor, a2: Tensor) -> dict[str, float | None]:
    error = relative_error(a1, a2)
    from_zero = (a1 == 0) & (a2 != 0) & ~a2.isnan()
    known = error.isfinite()
    sizes = error[known].abs()
    both = a1.isfinite() & a2.isfinite()
    return {
        "values": a1.numel(),
        "changed": int((a1 != a2).sum()),
        "from_zero": int(from_zero.sum()),
        "not_finite": int((~known & ~from_zero).sum()),
        "mean": float(sizes.mean()) if len(sizes) else None,
        "median": float(sizes.median()) if len(sizes) else None,
        "max": float(sizes.max()) if len(sizes) else None,
        "norm": _norm_ratio(a2[both] - a1[both], a1[both]),
    }


def _norm_ratio(difference: Tensor, whole: Tensor) -> float | None:
    """Return the ratio of norms, None if the second is 0; squares of large values would not be finite, so they are scaled."""
    norms = []
    for values in (difference, whole):
        largest = float(values.abs().max()) if values.numel() else 0.0
        norms.append(largest * float((values / largest).norm()) if largest else 0.0)
    return norms[0] / norms[1] if norms[1] else None
