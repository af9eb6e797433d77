"""Whether a subject computes the same bits again, with another number of threads, from other memory, and beside other samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.doctor.findings import Found
from holdfast.doctor.target import Subject, digest_of, digests_of, noise_like, results_of
from holdfast.torch_private import tree_flatten, tree_map

_TIMES = 3
"""How often the same is computed again: what differs now and then may not do so at once."""


def thread_counts() -> tuple[int, ...]:
    """Return numbers of threads that are tried."""
    return tuple(sorted({1, 2, 3, min(8, os.cpu_count() or 1)}))


def examine(subject: Subject, threads: Sequence[int], *, briefly: bool = False) -> Found:
    """Compute a subject in all the ways that should give the same bits, and return where they do not.

    Args:
        subject: What is computed.
        threads: Numbers of threads to try.
        briefly: Compute it once, only for its digests.
    """
    found = Found(subject.name)
    given = [value for value in tree_flatten((subject.args, dict(subject.kwargs)))[0] if torch.is_tensor(value)]
    found.digests = {f"input {i}": digest_of(value) for i, value in enumerate(given)}
    try:
        first = results_of(subject)
    except Exception as error:  # whatever a layer raises that is called outside of its model
        found.error = f"{type(error).__name__}: {error}".splitlines()[0]
        return found
    found.digests |= digests_of(first)
    if briefly:
        return found
    for _ in range(_TIMES - 1):
        found.again = found.again or differing(first, results_of(subject))
    if found.again:
        return found  # nothing else can be told apart from that
    for count in threads:
        with threads_set(count):
            if different := differing(first, results_of(subject)):
                found.threads[count] = different
    found.memory = differing(first, results_of(subject, prepare=at_odd_place))
    found.together = _together(subject, first)
    found.complaint = complaint_about(lambda: results_of(subject))
    return found


def differing(first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of what has other bits, or is only in one of the two."""
    one, two = digests_of(first), digests_of(other)
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Let torch compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def at_odd_place(value: torch.Tensor) -> torch.Tensor:
    """Return a copy, with its history, that begins one element behind where memory is aligned."""
    room = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
    placed = room[1:].view(value.shape).detach()
    return placed.copy_(value)


def complaint_about(compute: Callable[[], object]) -> str:
    """Return what torch says where it is to refuse what is not deterministic, "" if nothing."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        compute()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return ""


# -- beside other samples


def _together(subject: Subject, alone: Mapping[str, torch.Tensor]) -> list[str] | None:
    """Return what differs for the samples of a subject that are computed before or behind others; None if it has none.

    Gradients of parameters are sums over all samples, so they do not count.
    """
    dim = subject.rows
    given = [value for value in tree_flatten((subject.args, dict(subject.kwargs)))[0] if torch.is_tensor(value)]
    if dim is None or not given or any(value.dim() <= dim for value in given):
        return None
    size = given[0].shape[dim]
    wanted = {name: value for name, value in alone.items() if name.startswith(("output", "gradient of input"))}
    if any(value.shape[dim] != size for value in given) or any(
        value.dim() <= dim or value.shape[dim] != size for value in wanted.values()
    ):
        return None
    different: dict[str, None] = {}
    for is_first in (True, False):
        try:
            results = _beside_others(subject, dim, size, is_first=is_first)
        except Exception:  # it takes no more samples than these
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


def _beside_others(subject: Subject, dim: int, size: int, *, is_first: bool) -> dict[str, torch.Tensor]:
    def join(mine: torch.Tensor) -> torch.Tensor:
        others = mine.flip(dim)
        if mine.is_floating_point():  # or the statistics of a batch would stay what they are
            others = others * 0.75 + 0.25
        return torch.cat((mine, others) if is_first else (others, mine), dim)

    def joined(value: Any) -> Any:
        return join(value.detach()) if isinstance(value, torch.Tensor) else value

    def cotangent(number: int, value: torch.Tensor) -> torch.Tensor:
        return join(noise_like(number, value.detach().narrow(dim, 0, size)))

    args, kwargs = tree_map(joined, (subject.args, dict(subject.kwargs)))
    return results_of(subject, args=args, kwargs=kwargs, cotangent=cotangent)
