"""Checks whether a target computes the same bits again, with other threads, alignment and batch neighbours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.base.torch_private import tree_flatten, tree_map
from holdfast.tools.doctor.findings import Findings
from holdfast.tools.doctor.target import DoctorTarget, digest_of, digests_of, noise_like, results_of

_TIMES = 3
"""Number of repetitions: a difference may be intermittent."""


def thread_counts() -> tuple[int, ...]:
    """Return the thread counts to try."""
    return tuple(sorted({1, 2, 3, min(8, os.cpu_count() or 1)}))


def examine(subject: DoctorTarget, threads: Sequence[int], *, briefly: bool = False) -> Findings:
    """Compute a target under all conditions that should give the same bits, and return where they differ.

    Args:
        subject: The target.
        threads: Thread counts to try.
        briefly: Compute it once, only for its digests.
    """
    findings = Findings(subject.name)
    inputs = [value for value in tree_flatten((subject.args, dict(subject.kwargs)))[0] if torch.is_tensor(value)]
    findings.digests = {f"input {i}": digest_of(value) for i, value in enumerate(inputs)}
    try:
        first = results_of(subject)
    except Exception as error:  # whatever a layer raises when it is called outside of its model
        findings.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return findings
    findings.digests |= digests_of(first)
    if briefly:
        return findings
    for _ in range(_TIMES - 1):
        findings.again = findings.again or differing(first, results_of(subject))
    if findings.again:
        return findings  # all other comparisons would be inconclusive
    for count in threads:
        with threads_set(count):
            if different := differing(first, results_of(subject)):
                findings.threads[count] = different
    findings.memory = differing(first, results_of(subject, prepare=misaligned))
    findings.together = _together(subject, first)
    findings.complaint = complaint_about(lambda: results_of(subject))
    return findings


def differing(first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors whose bits differ, or which only one of the two has."""
    one, two = digests_of(first), digests_of(other)
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Set torch's number of threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def misaligned(value: torch.Tensor) -> torch.Tensor:
    """Return a copy, with its autograd history, that begins one element after an aligned address."""
    room = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
    placed = room[1:].view(value.shape).detach()
    return placed.copy_(value)


def complaint_about(compute: Callable[[], object]) -> str:
    """Return the error of ``torch.use_deterministic_algorithms(True)``, "" if there is none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        compute()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return ""


# -- batch neighbours


def _together(subject: DoctorTarget, alone: Mapping[str, torch.Tensor]) -> list[str] | None:
    """Return what differs for samples that are computed before or after other samples; None if the target has none.

    Gradients of parameters are sums over all samples, and are not compared.
    """
    dim = subject.rows
    inputs = [value for value in tree_flatten((subject.args, dict(subject.kwargs)))[0] if torch.is_tensor(value)]
    if dim is None or not inputs or any(value.dim() <= dim for value in inputs):
        return None
    size = inputs[0].shape[dim]
    wanted = {name: value for name, value in alone.items() if name.startswith(("output", "gradient of input"))}
    if any(value.shape[dim] != size for value in inputs) or any(
        value.dim() <= dim or value.shape[dim] != size for value in wanted.values()
    ):
        return None
    different: dict[str, None] = {}
    for is_first in (True, False):
        try:
            results = _beside_others(subject, dim, size, is_first=is_first)
        except Exception:  # it does not accept more samples
            return None
        start = 0 if is_first else size
        rows = {
            name: value.narrow(dim, start, size)
            for name, value in results.items()
            if name in wanted and value.dim() > dim and value.shape[dim] == 2 * size
        }
        if rows.keys() != wanted.keys():
            return None
        different |= dict.fromkeys(differing(wanted, rows))
    return list(different)


def _beside_others(subject: DoctorTarget, dim: int, size: int, *, is_first: bool) -> dict[str, torch.Tensor]:
    def join(samples: torch.Tensor) -> torch.Tensor:
        neighbours = samples.flip(dim)
        if samples.is_floating_point():  # otherwise batch statistics would not change
            neighbours = neighbours * 0.75 + 0.25
        return torch.cat((samples, neighbours) if is_first else (neighbours, samples), dim)

    def joined(value: Any) -> Any:
        return join(value.detach()) if isinstance(value, torch.Tensor) else value

    def cotangent(number: int, value: torch.Tensor) -> torch.Tensor:
        return join(noise_like(number, value.detach().narrow(dim, 0, size)))

    args, kwargs = tree_map(joined, (subject.args, dict(subject.kwargs)))
    return results_of(subject, args=args, kwargs=kwargs, cotangent=cotangent)
