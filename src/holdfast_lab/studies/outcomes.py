"""Outcome of a training run with an injected fault: its class, a digest of its bits, and the error of each layer.

=======  =============================================================================================
class    meaning
=======  =============================================================================================
RWC      restart without change: the accuracy is within a limit of that of the fault-free run
AccR     accuracy reduction: the accuracy is lower by more than the limit
NaN      collapse: a loss or a weight is NaN or infinite
TF       training failed: it raised an exception, or its process died
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
"""The paper's limit: a drop of "more than 5 %". The text available to us does not say whether relative or in points."""


def outcome_of(
    accuracy: float,
    undisturbed: float,
    *,
    finite: bool,
    limit: float = LIMIT,
    drop: Literal["points", "relative"] = "points",
) -> str:
    """Return the class of a training run that finished: RWC, AccR or NaN.

    Args:
        accuracy: Final accuracy, from 0 to 1.
        undisturbed: Final accuracy of the fault-free run, from 0 to 1.
        finite: Whether all losses and weights are finite; see :func:`are_finite`.
        limit: The largest drop that counts as no change, ``>= 0``.
        drop: How the drop is measured: in points ("points": 0.93 to 0.88 is a drop of 0.05), or relative to the
            fault-free accuracy ("relative": the same drop is 0.054).
    """
    if not finite:
        return NAN
    whole = 1.0 if drop == "points" else undisturbed
    # Tolerates rounding errors: a drop of exactly the limit is no change.
    return ACCR if undisturbed - accuracy > limit * whole + 1e-9 else RWC


def are_finite(losses: Iterable[float], tensors: Iterable[Tensor]) -> bool:
    """Return whether all losses and all tensor values are finite."""
    return all(map(math.isfinite, losses)) and all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of 32 hexadecimal digits over every bit, shape, dtype and name: equal if states are bit-equal.

    Unlike ``==`` it distinguishes 0 from -0, and NaNs with different bits.
    """
    whole = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor_bytes(tensor.contiguous()))
    return whole.hexdigest()


def relative_error(undisturbed: Tensor, disturbed: Tensor) -> Tensor:
    """Return (A2 - A1) / |A1| for each value, in float64; A1 is the fault-free tensor.

    Where A1 is 0, the error is 0 if A2 is 0 too, and infinite with the sign of A2 otherwise. It is NaN where A1 is not
    finite or A2 is NaN.
    """
    a1, a2 = undisturbed.detach().to(torch.float64), disturbed.detach().to(torch.float64)
    error = (a2 - a1) / a1.abs()
    return torch.where((a1 == 0) & (a2 == 0), torch.zeros_like(error), error)


def layer_errors(
    undisturbed: Mapping[str, Tensor], disturbed: Mapping[str, Tensor]
) -> dict[str, dict[str, float | None]]:
    """Return the differences between two models for each layer, by its name: the tensor name up to the last dot.

    Args:
        undisturbed: Tensors of the fault-free model by name; integer tensors are skipped.
        disturbed: Tensors of the same names and shapes.

    Returns:
        The number of ``values``, and how many of them are ``changed``, ``from_zero`` (A1 is 0, A2 is not) and
        ``not_finite`` (the relative error is not finite for another reason); over the remaining values, ``mean``,
        ``median`` and ``max`` of the absolute relative error, None if none remain; and ``norm``, the norm of A2 - A1
        over the norm of A1 over finite values, which tolerates zeros, None if A1 is 0.

    Source:
        The relative error: Rojas, Perez, Meneses (2024), as above. The treatment of zeros is our own.
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
    """Return the ratio of norms, None if the second is 0. Values are scaled first, so that squares do not overflow."""
    norms = []
    for values in (difference, whole):
        largest = float(values.abs().max()) if values.numel() else 0.0
        norms.append(largest * float((values / largest).norm()) if largest else 0.0)
    return norms[0] / norms[1] if norms[1] else None
