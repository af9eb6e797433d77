"""Something that computes, and what it makes of its inputs: a layer, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from holdfast.data.seeds import seed_of, seeded
from holdfast.torch_private import tree_flatten, tree_map

_ALIGNED_BYTES = 64
_KEY = 20
"""Seeds the generators before each computation, as Holdfast does for each slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something that computes.

    Args:
        name: For people.
        compute: Is given ``args`` and ``kwargs``, and returns tensors, in whatever they are.
        args: Tensors, in whatever they are; never changed.
        kwargs: The same.
        parameters: Whose gradients belong to what is computed.
        module: Whose buffers are put back after each computation.
        rows: The dimension of inputs and outputs in which independent samples lie; None: there is none, or nobody knows.
    """

    name: str
    compute: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
    rows: int | None = None

    @classmethod
    def of(cls, name: str, module: nn.Module, *args: Any, rows: int | None = 0, **kwargs: Any) -> Subject:
        """Return a module as a subject."""
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        return cls(name=name, compute=module, args=args, kwargs=kwargs, parameters=parameters, module=module, rows=rows)


def results_of(
    subject: Subject,
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    prepare: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    cotangent: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return what a subject computes, by name: outputs, gradients of its inputs and parameters, buffers.

    Args:
        subject: What is computed.
        args: Other inputs than its own.
        kwargs: The same.
        prepare: Gives what a tensor of the inputs is handed over as.
        cotangent: Gives the gradient of an output, by its number; default: fixed noise.
    """
    given = (subject.args if args is None else args, dict(subject.kwargs if kwargs is None else kwargs))
    leaves: list[torch.Tensor] = []

    def hand_over(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() or value.is_complex():
            value = value.detach().clone().requires_grad_()
            leaves.append(value)
        return prepare(value)

    with _buffers_kept(subject.module), seeded(_KEY):
        args, kwargs = tree_map(hand_over, given)
        made = subject.compute(*args, **(kwargs or {}))
        outputs = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
        results = {f"output {i}" if i else "output": value.detach().clone() for i, value in enumerate(outputs)}
        results |= _gradients(subject, outputs, leaves, cotangent or noise_like)
        if subject.module is not None:
            results |= {f"buffer {name}": value.clone() for name, value in subject.module.named_buffers()}
    return results


def _gradients(
    subject: Subject,
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    cotangent: Callable[[int, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    ends = [(i, value) for i, value in enumerate(outputs) if value.requires_grad]
    wanted = {f"gradient of input {i}": leaf for i, leaf in enumerate(leaves)}
    wanted |= {f"gradient of {name}": parameter for name, parameter in subject.parameters.items()}
    if not (ends and wanted):
        return {}
    found = torch.autograd.grad(
        [value for _, value in ends],
        list(wanted.values()),
        [cotangent(i, value) for i, value in ends],
        allow_unused=True,
    )
    return {name: value for name, value in zip(wanted, found, strict=True) if value is not None}


def noise_like(number: int, value: torch.Tensor) -> torch.Tensor:
    """Return numbers of the shape of an output that depend on its number alone."""
    generator = torch.Generator("cpu").manual_seed(seed_of("cotangent", number))
    real = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    return real.to(device=value.device, dtype=value.dtype)


def is_at_odd_place(value: torch.Tensor) -> bool:
    """Return whether a tensor does not begin where torch lets those begin that it makes, so that kernels may take another path."""
    return value.numel() > 0 and value.data_ptr() % _ALIGNED_BYTES > 0


@contextmanager
def _buffers_kept(module: nn.Module | None) -> Iterator[None]:
    """Put buffers back where they were."""
    before = {} if module is None else {name: value.clone() for name, value in module.named_buffers()}
    try:
        yield
    finally:
        if module is not None:
            put_back(module, before)


def put_back(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give the buffers of a module the values that they had."""
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])


def digest_of(value: torch.Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits; all NaNs of the same bits are alike."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    said = f"{value.dtype}{tuple(value.shape)}".encode()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return xxhash.xxh3_64_hexdigest(said + data)


def digests_of(results: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each."""
    return {name: digest_of(value) for name, value in results.items()}
