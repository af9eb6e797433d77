"""A target of the checks, such as a layer, and its results: outputs, gradients and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn

from holdfast.base.torch_private import tree_flatten, tree_map
from holdfast.data.seeds import seed_of, seeded

_ALIGNED_BYTES = 64
_KEY = 20
"""Seeds the generators before each computation, as Holdfast does for each slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorTarget:
    """A target: a computation to check.

    Args:
        name: Name in the report.
        compute: Called with ``args`` and ``kwargs``; returns tensors, in any nesting.
        args: Tensors, in any nesting; never modified.
        kwargs: The same.
        parameters: Parameters whose gradients are compared.
        module: Module whose buffers are restored after each computation.
        rows: Dimension of independent samples in inputs and outputs; None if there is none, or it is unknown.
    """

    name: str
    compute: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
    rows: int | None = None

    @classmethod
    def of(cls, name: str, module: nn.Module, *args: Any, rows: int | None = 0, **kwargs: Any) -> DoctorTarget:
        """Return a module as a target."""
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        return cls(name=name, compute=module, args=args, kwargs=kwargs, parameters=parameters, module=module, rows=rows)

    def on(self, device: torch.device) -> DoctorTarget:
        """Return the target on a device, with the same bits in its inputs and weights."""
        module = None if self.module is None else self.module.to(device)
        parameters = {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}
        args, kwargs = tree_map(
            lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, (self.args, dict(self.kwargs))
        )
        return dataclasses.replace(
            self,
            compute=self.compute if module is None else module,
            args=args,
            kwargs=kwargs,
            parameters=parameters,
            module=module,
        )


def results_of(
    subject: DoctorTarget,
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    prepare: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    cotangent: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the results of a target, by name: outputs, gradients of its inputs and parameters, buffers.

    Args:
        subject: The target.
        args: Inputs instead of its own.
        kwargs: The same.
        prepare: Applied to each input tensor before the computation.
        cotangent: Returns the gradient of an output, by its number; default: fixed noise.
    """
    inputs = (subject.args if args is None else args, dict(subject.kwargs if kwargs is None else kwargs))
    leaves: list[torch.Tensor] = []

    def hand_over(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() or value.is_complex():
            value = value.detach().clone().requires_grad_()
            leaves.append(value)
        return prepare(value)

    with _buffers_kept(subject.module), seeded(_KEY):
        args, kwargs = tree_map(hand_over, inputs)
        made = subject.compute(*args, **(kwargs or {}))
        outputs = [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
        results = {f"output {i}" if i else "output": value.detach().clone() for i, value in enumerate(outputs)}
        results |= _gradients(subject, outputs, leaves, cotangent or noise_like)
        if subject.module is not None:
            results |= {f"buffer {name}": value.clone() for name, value in subject.module.named_buffers()}
    return results


def _gradients(
    subject: DoctorTarget,
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    cotangent: Callable[[int, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    ends = [(i, value) for i, value in enumerate(outputs) if value.requires_grad]
    wanted = {f"gradient of input {i}": leaf for i, leaf in enumerate(leaves)}
    wanted |= {f"gradient of {name}": parameter for name, parameter in subject.parameters.items()}
    if not (ends and wanted):
        return {}
    gradients = torch.autograd.grad(
        [value for _, value in ends],
        list(wanted.values()),
        [cotangent(i, value) for i, value in ends],
        allow_unused=True,
    )
    return {name: value for name, value in zip(wanted, gradients, strict=True) if value is not None}


def noise_like(number: int, value: torch.Tensor) -> torch.Tensor:
    """Return random numbers in the shape of an output, which depend only on its number."""
    generator = torch.Generator("cpu").manual_seed(seed_of("cotangent", number))
    real = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
    return real.to(device=value.device, dtype=value.dtype)


def is_misaligned(value: torch.Tensor) -> bool:
    """Return whether a tensor is not aligned as torch aligns new tensors, so that kernels may take another path."""
    return value.numel() > 0 and value.data_ptr() % _ALIGNED_BYTES > 0


@contextmanager
def _buffers_kept(module: nn.Module | None) -> Iterator[None]:
    """Restore the buffers at the end of the context."""
    before = {} if module is None else {name: value.clone() for name, value in module.named_buffers()}
    try:
        yield
    finally:
        if module is not None:
            put_back(module, before)


def put_back(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore the buffers of a module."""
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])


def digest_of(value: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits; two NaNs are equal only if their bits are."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    header = f"{value.dtype}{tuple(value.shape)}".encode()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return xxhash.xxh3_64_hexdigest(header + data)


def digests_of(results: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each result."""
    return {name: digest_of(value) for name, value in results.items()}
