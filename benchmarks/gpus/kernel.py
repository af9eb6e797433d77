"""The kernel of the ordered addition: its bits against torch, and its speed against a copy."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from gpus.results import Results, Where
from holdfast.comm.allreduce.adding import ORDERS, MeanDivisor
from holdfast.comm.allreduce.ordered_add import HAS_TRITON, add_by_kernel, add_by_torch, kernel_works, ordered_add

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.1754942e-38, 3.4e38, -3.4e38)
BATCH_S, WARM_S = 0.02, 0.2
"""How long a batch takes, and how long the clock of a GPU may take to rise, seconds."""
LEAST = 0.8
"""The kernel reaches this share of the bandwidth of a copy, where it has enough numbers to show it."""


def run(where: Where, results: Results) -> None:
    """Compare bits, then measure."""
    used = where.is_gpu and HAS_TRITON and kernel_works(torch.device("cuda", torch.cuda.current_device()))
    results.check("the kernel is used", used or not where.is_gpu, "yes" if used else "no, torch adds")
    for name, dtype in DTYPES.items():
        for order in ("fold", "tree", "wide"):
            check_bits(where, results, f"bits, {name}, {order}", dtype, order)
    reciprocals(where, results)
    for name, dtype in DTYPES.items():
        speed(where, results, name, dtype)


def terms_of(numbers: range, length: int, dtype: torch.dtype, seed: int) -> list[tuple[int, torch.Tensor]]:
    """Return terms of random bits: normal, huge, denormal, infinite and NaN, and all pairs of special numbers."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for k, number in enumerate(numbers):
        term = torch.randint(-(2**31), 2**31, (length,), generator=generator).to(torch.int32).view(torch.float32)
        term[: length // 2] = torch.randn(length // 2, generator=generator)
        pairs = [(a, b)[k % 2] for a in SPECIAL for b in SPECIAL]
        term[: len(pairs)] = torch.tensor(pairs)
        made.append((number, term.to(dtype)))
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits in host memory; all NaN have the same."""
    here = tensor.cpu()
    return torch.where(here.isnan(), torch.nan, here).view({2: torch.int16, 4: torch.int32}[here.itemsize])


def check_bits(where: Where, results: Results, name: str, dtype: torch.dtype, order: str) -> None:
    """Compare with the additions by torch in host memory."""
    length, wrong, compared = where.size(1 << 20, 3000) + 7, 0, 0
    for seed, numbers in enumerate((range(2), range(1, 8), range(3, 40, 3), range(64))):
        terms = terms_of(numbers, length, dtype, seed)
        there = [(number, term.to(where.device)) for number, term in terms]
        for mean in (None, MeanDivisor(300.0, length - 100)):
            expected, out = torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype, device=where.device)
            add_by_torch(terms, expected, order, mean)
            (add_by_kernel if where.is_gpu else ordered_add)(there, out, order, mean)
            wrong += int((bits(out) != bits(expected)).sum())
            compared += length
    results.check(name, wrong == 0, f"{wrong} of {compared} elements differ from torch in host memory")


def reciprocals(where: Where, results: Results) -> None:
    """Say how often torch's division by a number of the host differs from division."""
    x = torch.randn(where.size(1 << 20, 3000))
    there = x.clone().to(where.device).div_(300.0).cpu()
    results.figure(
        "div_ by a number of the host", f"{(there != x / 300.0).double().mean():.1%} of elements not correctly rounded"
    )


def speed(where: Where, results: Results, name: str, dtype: torch.dtype) -> None:
    """Measure GB/s of memory traffic: K + 1 transfers an element, and 2 for the copy."""
    for num_terms in (2, 4) if where.tiny else (2, 4, 8, 16, 64):
        length = where.size(most_numbers(num_terms + 1, dtype.itemsize), 1 << 14)
        terms = [(k, torch.randn(length, device=where.device, dtype=dtype)) for k in range(num_terms)]
        out = torch.empty(length, dtype=dtype, device=where.device)
        mean = MeanDivisor(300.0, length)
        copied_s = seconds(where, functools.partial(out.copy_, terms[0][1]))
        ours_s = seconds(where, functools.partial(ordered_add, terms, out, "tree", mean))
        torch_s = seconds(where, functools.partial(ORDERS["tree"], terms, out))
        moved = length * dtype.itemsize / 1e9
        copied, ours = 2 * moved / copied_s, (num_terms + 1) * moved / ours_s
        text = f"{ours:.0f} GB/s, {ours / copied:.0%} of a copy's; torch {(num_terms + 1) * moved / torch_s:.0f} GB/s"
        results.check(
            f"speed, {name}, {num_terms} terms", ours >= LEAST * copied or not where.is_gpu or where.tiny, text
        )


def most_numbers(tensors: int, itemsize: int) -> int:
    """Return how long tensors may be that fill half of what is free on the GPU together, up to 512 MB each."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return min(1 << 29, free // 2 // tensors) // itemsize


def seconds(where: Where, act: Callable[[], object]) -> float:
    """Return how long a call takes, median of several batches of calls that the host queues one behind the other."""
    begun_s = time.perf_counter()
    for _ in range(3):
        act()
    where.synchronize()
    calls = max(1, round(BATCH_S / max(1e-6, (time.perf_counter() - begun_s) / 3))) if where.is_gpu else 1
    warm_s = time.perf_counter() + (0.0 if where.tiny else WARM_S)
    while time.perf_counter() < warm_s:
        act()
        where.synchronize()
    took = []
    for _ in range(where.size(9, 3)):
        begun_s = time.perf_counter()
        for _ in range(calls):
            act()
        where.synchronize()
        took.append((time.perf_counter() - begun_s) / calls)
    return statistics.median(took)
