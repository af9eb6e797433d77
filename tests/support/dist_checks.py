"""The contract of torch.distributed, checked inside each worker: ``python dist_checks.py BACKEND [--ranks N] [NAMES]...``.

The same checks run on any backend. Each writes one JSON line: ``bits`` is a digest of results in which this rank must
agree with its peer on another backend, ``shared`` of those in which all ranks of the job must agree, ``notes`` lists
calls that the backend refused. A failed check adds ``error``. The workers then run the next check if the group still
works, and otherwise end, because all further errors would be consequences of the first failure.
"""

import argparse
import contextlib
import copy
import datetime
import faulthandler
import functools
import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ScriptError

DEADLINE_S = 45
FOLDER = "DIST_CHECKS_FOLDER"
"""Environment variable with the folder for the output, and for a store that synchronises workers between two checks."""

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
MOVED = (*FLOATS, *WHOLE, *COMPLEX)
"""Dtypes that Gloo's collectives support."""

REFUSED = (torch.int16, torch.uint16)
"""Dtypes that Gloo's collectives refuse; its send and recv support them."""

REJECTIONS = (RuntimeError, ValueError, TypeError)

CHECKS = {}


def check(function):
    """Add ``function(job)`` to the checks."""
    CHECKS[function.__name__] = function
    return function


class Job:
    """This worker, and the results of a check in it."""

    def __init__(self, backend, folder):
        self.backend = backend
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.ranks = range(self.size)
        self.right = (self.rank + 1) % self.size
        self.left = (self.rank - 1) % self.size
        files = Path(folder, "store") if folder else None
        self.store = dist.FileStore(str(files), self.size) if files else dist.distributed_c10d._get_default_store()
        self.start()

    def start(self):
        """Drop the results of the previous check."""
        self._bits, self._shared, self.notes = hashlib.sha256(), hashlib.sha256(), []

    def results(self):
        return {"bits": self._bits.hexdigest(), "shared": self._shared.hexdigest(), "notes": self.notes}

    def exact(self, *tensors):
        """Another backend gives bit-identical results at this rank."""
        for tensor in tensors:
            self._bits.update(_described(tensor))

    def shared(self, *tensors):
        """Every rank of this job holds bit-identical values."""
        for tensor in tensors:
            self._shared.update(_described(tensor))

    def sums(self, *tensors):
        """Sums held by all ranks; the order of adding decides their last bit, except between two ranks."""
        self.shared(*tensors)
        if self.size == 2:
            self.exact(*tensors)


def _described(tensor):
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + bits(tensor).numpy().tobytes()


def bits(tensor):
    """The bytes of a tensor; for a bool only its truth, because Gloo stores 2 for True plus True."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat != 0 if tensor.dtype == torch.bool else flat


def assert_same(given, expected):
    """The same dtype, shape and bits."""
    assert (given.dtype, given.shape) == (expected.dtype, expected.shape), (given.dtype, given.shape, expected.shape)
    assert torch.equal(bits(given), bits(expected)), f"{given}\nis not\n{expected}"


def assert_close(given, expected, tolerance=1e-5):
    torch.testing.assert_close(given.double(), expected.double(), rtol=tolerance, atol=tolerance)


def values(dtype, *key, shape=(5, 3)):
    """Numbers from the whole range of ``dtype``, the same for the same ``key`` in every process."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6], "big")
    source = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=source)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, generator=source).to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.randint(max(low, -(2**62)), min(high, 2**62), shape, generator=source).to(dtype)


def rejects(call):
    """``call`` raises an exception that callers of torch.distributed catch; return it."""
    try:
        call()
    except REJECTIONS as error:
        return error
    message = "this should have been refused"
    raise AssertionError(message)


def eventually(condition):
    """Whether ``condition()`` becomes true soon."""
    end = time.monotonic() + 15
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def still_works(job, group=None):
    """The group still works after a call that it refused."""
    one = torch.ones(2, dtype=torch.int64)
    dist.all_reduce(one, group=group)
    assert one.tolist() == [dist.get_world_size(group)] * 2


def right_or_refused(job, name, call, verify):
    """Gloo refuses ``call``; another backend may too, or must give a result that ``verify`` accepts."""
    if job.backend == "gloo":
        job.notes.append(f"{name}: {type(rejects(call)).__name__}")
        return
    try:
        result = call()
    except REJECTIONS as error:
        job.notes.append(f"{name}: {type(error).__name__}")
    else:
        verify(result)


# ---------------------------------------------------------------------------------------------
# Reductions: every operation, every dtype

ARITHMETIC = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(name, inputs):
    """The exact result, or for rounded sums and products the float64 one, with a fair tolerance."""
    dtype = inputs[0].dtype
    if dtype in REFUSED:  # torch itself cannot add some of these
        return functools.reduce(ARITHMETIC[name], [x.to(torch.int64) for x in inputs]).to(dtype), None
    if name in ("MIN", "MAX", "BAND", "BOR", "BXOR") or dtype in WHOLE:
        return functools.reduce(ARITHMETIC[name], inputs), None
    wide = torch.complex128 if dtype.is_complex else torch.float64
    wider = [x.to(wide) for x in inputs]
    if name == "PRODUCT":
        exact = functools.reduce(torch.mul, wider)
        scale = exact.abs()
    else:
        exact = functools.reduce(torch.add, wider)
        scale = sum(x.abs() for x in wider)
    if name == "AVG":
        exact = exact / len(inputs)
    if name == "PREMUL_SUM":
        exact, scale = exact * 2, scale * 2
    return exact, scale * torch.finfo(dtype).eps * len(inputs) + torch.finfo(dtype).tiny


def assert_reduced(given, name, inputs):
    expected, tolerance = reduced(name, inputs)
    assert given.dtype == inputs[0].dtype
    if tolerance is None:
        assert_same(given, expected)
    else:
        assert given.shape == expected.shape
        off = (given.to(expected.dtype) - expected).abs()
        assert bool((off <= tolerance).all()), f"{name} {given.dtype}: off by {off.max()}"


def gloo_refuses(name, dtype):
    """Whether Gloo refuses this operation on this dtype, whatever the collective."""
    if dtype in REFUSED or name == "PREMUL_SUM":
        return True
    if dtype.is_complex:
        return name not in ("SUM", "AVG")
    if dtype.is_floating_point:
        return name in ("BAND", "BOR", "BXOR")
    return name == "AVG"


def reductions():
    """Each operation with its name and each dtype; operations undefined in every library are left out."""
    for name in (*ARITHMETIC, "AVG", "PREMUL_SUM"):
        op = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
        for dtype in (*MOVED, *REFUSED):
            yield name, op, dtype


def check_matrix(job, reduce, mine):
    """``reduce(op, dtype, key)`` returns this rank's result, ``mine(dtype, key)`` the inputs that it is made of."""
    for name, op, dtype in reductions():
        key = f"{name} {dtype}"

        def call(op=op, dtype=dtype, key=key):
            return reduce(op, dtype, key)

        def verify(given, name=name, dtype=dtype, key=key):
            if given is not None:
                assert_reduced(given, name, mine(dtype, key))

        if not gloo_refuses(name, dtype):
            given = call()
            verify(given)
            if given is not None and (name in ("MIN", "MAX") or dtype in WHOLE):
                job.exact(given)
        elif name in ARITHMETIC and (dtype in REFUSED) and name not in ("MIN", "MAX", "SUM"):
            continue  # for two refused dtypes, three operations show the same as seven
        elif (name, dtype.is_floating_point or dtype.is_complex) in (("AVG", False), ("PREMUL_SUM", False)):
            job.notes.append(f"{key}: {type(rejects(call)).__name__}")
        elif name in ("BAND", "BOR", "BXOR") or (dtype.is_complex and name in ("MIN", "MAX")):
            job.notes.append(f"{key}: {type(rejects(call)).__name__}")  # there is no correct result
        else:
            right_or_refused(job, key, call, verify)
    still_works(job)


@check
def all_reduce_of_every_op_and_dtype(job):
    def reduce(op, dtype, key):
        given = values(dtype, key, job.rank)
        assert dist.all_reduce(given, op) is None
        job.shared(given)
        return given

    check_matrix(job, reduce, lambda dtype, key: [values(dtype, key, rank) for rank in job.ranks])


@check
def reduce_of_every_op_and_dtype(job):
    def reduce(op, dtype, key):
        given = values(dtype, key, job.rank)
        dist.reduce(given, job.size - 1, op)
        return given if job.rank == job.size - 1 else None

    check_matrix(job, reduce, lambda dtype, key: [values(dtype, key, rank) for rank in job.ranks])


@check
def reduce_scatter_of_every_op_and_dtype(job):
    def reduce(op, dtype, key):
        given = torch.empty(5, 3, dtype=dtype)
        dist.reduce_scatter(given, [values(dtype, key, job.rank, part) for part in job.ranks], op)
        return given

    check_matrix(job, reduce, lambda dtype, key: [values(dtype, key, rank, job.rank) for rank in job.ranks])


@check
def reduce_scatter_tensor_of_every_op_and_dtype(job):
    def reduce(op, dtype, key):
        given = torch.empty(5, 3, dtype=dtype)
        whole = torch.cat([values(dtype, key, job.rank, part) for part in job.ranks])
        dist.reduce_scatter_tensor(given, whole, op)
        return given

    check_matrix(job, reduce, lambda dtype, key: [values(dtype, key, rank, job.rank) for rank in job.ranks])


@check
def reduce_to_every_root(job):
    for root, dtype in itertools.product(job.ranks, (torch.float32, torch.int64)):
        given = values(dtype, root, job.rank)
        dist.reduce(given, dst=root)
        if job.rank == root:
            assert_reduced(given, "SUM", [values(dtype, root, rank) for rank in job.ranks])


@check
def the_same_sum_twice_has_the_same_bits(job):
    for size in (1, 7, 1000, 100_003):
        first, second = (values(torch.float32, size, job.rank, shape=(size,)) for _ in range(2))
        dist.all_reduce(first)
        dist.all_reduce(second)
        assert_same(first, second)
        job.sums(first)


# ---------------------------------------------------------------------------------------------
# Moving data


@check
def broadcast_from_every_root(job):
    for root, dtype in itertools.product(job.ranks, MOVED):
        given = values(dtype, root, job.rank)
        dist.broadcast(given, src=root)
        assert_same(given, values(dtype, root, root))
        job.shared(given)
        job.exact(given)
    given = torch.full((3,), float(job.rank))
    dist.broadcast(given, group_src=job.size - 1)
    assert given.tolist() == [job.size - 1.0] * 3


@check
def all_gather_of_every_dtype(job):
    for dtype in MOVED:
        given = [torch.empty(5, 3, dtype=dtype) for _ in job.ranks]
        dist.all_gather(given, values(dtype, job.rank))
        for rank in job.ranks:
            assert_same(given[rank], values(dtype, rank))
        job.shared(*given)
        job.exact(*given)


@check
def all_gather_into_tensor_of_every_dtype(job):
    for dtype in MOVED:
        given = torch.empty(5 * job.size, 3, dtype=dtype)
        dist.all_gather_into_tensor(given, values(dtype, job.rank))
        assert_same(given, torch.cat([values(dtype, rank) for rank in job.ranks]))
        job.shared(given)
        job.exact(given)


@check
def all_gather_into_one_stacked_tensor(job):
    def call(shape):
        given = torch.empty(shape)
        dist.all_gather_into_tensor(given, values(torch.float32, job.rank, shape=(2, 3)))
        return given

    expected = torch.cat([values(torch.float32, rank, shape=(2, 3)) for rank in job.ranks])
    for shape in ((job.size, 2, 3), (6 * job.size,)):  # documented, NCCL takes them, Gloo does not
        right_or_refused(
            job, f"{len(shape)}-d", lambda s=shape: call(s), lambda x: assert_same(x.view(-1, 3), expected)
        )
    still_works(job)


@check
def gather_to_every_root(job):
    for root, dtype in itertools.product(job.ranks, (*FLOATS, *WHOLE)):
        given = [torch.empty(5, 3, dtype=dtype) for _ in job.ranks] if job.rank == root else None
        dist.gather(values(dtype, root, job.rank), given, dst=root)
        for rank, part in enumerate(given or ()):
            assert_same(part, values(dtype, root, rank))
            job.exact(part)

    def call():
        given = [torch.empty(5, 3, dtype=torch.complex64) for _ in job.ranks] if job.rank == 0 else None
        dist.gather(values(torch.complex64, job.rank), given, dst=0)
        return given

    def verify(given):
        for rank, part in enumerate(given or ()):
            assert_same(part, values(torch.complex64, rank))

    right_or_refused(job, "complex", call, verify)


@check
def scatter_from_every_root(job):
    for root, dtype in itertools.product(job.ranks, MOVED):
        given = torch.empty(5, 3, dtype=dtype)
        parts = [values(dtype, root, rank) for rank in job.ranks] if job.rank == root else None
        dist.scatter(given, parts, src=root)
        assert_same(given, values(dtype, root, job.rank))
        job.exact(given)


@check
def all_to_all_of_every_dtype(job):
    for dtype in MOVED:
        given = [torch.empty(5, 3, dtype=dtype) for _ in job.ranks]
        dist.all_to_all(given, [values(dtype, job.rank, to) for to in job.ranks])
        for sender in job.ranks:
            assert_same(given[sender], values(dtype, sender, job.rank))
        job.exact(*given)


@check
def all_to_all_single_of_every_dtype(job):
    for dtype in MOVED:
        given = torch.empty(5 * job.size, 3, dtype=dtype)
        dist.all_to_all_single(given, torch.cat([values(dtype, job.rank, to) for to in job.ranks]))
        assert_same(given, torch.cat([values(dtype, sender, job.rank) for sender in job.ranks]))
        job.exact(given)


@check
def all_to_all_single_in_unequal_parts(job):
    def rows(sender, to):
        return (2 * sender + 3 * to) % 4  # may be zero

    for dtype in (torch.float32, torch.int64, torch.complex64):
        sent = [values(dtype, job.rank, to, shape=(rows(job.rank, to), 2)) for to in job.ranks]
        expected = torch.cat([values(dtype, s, job.rank, shape=(rows(s, job.rank), 2)) for s in job.ranks])
        given = torch.empty_like(expected)
        dist.all_to_all_single(
            given,
            torch.cat(sent),
            output_split_sizes=[rows(sender, job.rank) for sender in job.ranks],
            input_split_sizes=[len(part) for part in sent],
        )
        assert_same(given, expected)
        job.exact(given)


@check
def all_to_all_single_of_rows_that_cannot_be_divided(job):
    """Scripts try it out, and catch what the backends of torch raise."""
    rows = job.size + 1
    try:
        dist.all_to_all_single(torch.zeros(rows), torch.zeros(rows))
    except RuntimeError:
        return
    message = f"{rows} rows should have been refused"
    raise AssertionError(message)


@check
def all_to_all_single_to_one_receiver(job):
    here = job.size if job.rank == 0 else 0
    given = torch.empty(2 * here)
    splits = [2 if rank == 0 else 0 for rank in job.ranks]
    dist.all_to_all_single(given, torch.full((2,), float(job.rank)), [2 * bool(here)] * job.size, splits)
    assert given.tolist() == [float(rank) for rank in range(here) for _ in range(2)]


@check
def reduce_scatter_of_unequal_shapes(job):
    given = torch.empty(job.rank + 1, 2)
    dist.reduce_scatter(given, [torch.full((rank + 1, 2), float(job.rank + rank)) for rank in job.ranks])
    assert_same(given, torch.full((job.rank + 1, 2), float(sum(job.ranks) + job.size * job.rank)))


@check
def lists_of_unequal_shapes(job):
    """Each is correct or refused: Gloo refuses both."""

    def shape(rank):
        return (rank + 1, 2)

    def gathered():
        given = [torch.empty(shape(rank)) for rank in job.ranks]
        dist.all_gather(given, values(torch.float32, job.rank, shape=shape(job.rank)))
        return given

    def exchanged():
        given = [torch.empty(shape(sender + job.rank)) for sender in job.ranks]
        dist.all_to_all(given, [values(torch.float32, job.rank, to, shape=shape(to + job.rank)) for to in job.ranks])
        return given

    def verify_gathered(given):
        for rank in job.ranks:
            assert_same(given[rank], values(torch.float32, rank, shape=shape(rank)))

    def verify_exchanged(given):
        for sender in job.ranks:
            expected = values(torch.float32, sender, job.rank, shape=shape(sender + job.rank))
            assert_same(given[sender], expected)

    right_or_refused(job, "all_gather", gathered, verify_gathered)
    right_or_refused(job, "all_to_all", exchanged, verify_exchanged)
    still_works(job)


# ---------------------------------------------------------------------------------------------
# Shapes and layouts


def every_collective(job, shape, dtype=torch.float32):
    """Call each with tensors of ``shape`` and verify; sums are of integers, and therefore exact."""

    def mine(*key):
        return (values(torch.int32, *key, shape=shape) % 100).to(dtype)

    def empty():
        return torch.empty(shape, dtype=dtype)

    here, ranks = job.rank, job.ranks
    total = sum((mine(rank) for rank in ranks), torch.zeros(shape, dtype=dtype))
    mixed = sum((mine(rank, here) for rank in ranks), torch.zeros(shape, dtype=dtype))

    given = mine(here)
    dist.all_reduce(given)
    assert_same(given, total)
    given = mine(here)
    dist.broadcast(given, 1)
    assert_same(given, mine(1))
    given = mine(here)
    dist.reduce(given, 0)
    if here == 0:
        assert_same(given, total)
    parts = [empty() for _ in ranks]
    dist.all_gather(parts, mine(here))
    assert_all_same(parts, [mine(rank) for rank in ranks])
    parts = [empty() for _ in ranks] if here == 0 else None
    dist.gather(mine(here), parts, 0)
    assert_all_same(parts or [], [mine(rank) for rank in ranks if here == 0])
    given = empty()
    dist.scatter(given, [mine(rank) for rank in ranks] if here == 0 else None, 0)
    assert_same(given, mine(here))
    given = empty()
    dist.reduce_scatter(given, [mine(here, part) for part in ranks])
    assert_same(given, mixed)
    parts = [empty() for _ in ranks]
    dist.all_to_all(parts, [mine(here, to) for to in ranks])
    assert_all_same(parts, [mine(sender, here) for sender in ranks])
    given = empty()
    works = [dist.isend(mine(here), job.right), dist.irecv(given, job.left)]
    wait(works)
    assert_same(given, mine(job.left))
    if not shape:
        return  # there is no first dimension to concatenate along
    given = torch.cat([empty() for _ in ranks])
    dist.all_gather_into_tensor(given, mine(here))
    assert_same(given, torch.cat([mine(rank) for rank in ranks]))
    given = empty()
    dist.reduce_scatter_tensor(given, torch.cat([mine(here, part) for part in ranks]))
    assert_same(given, mixed)
    given = torch.cat([empty() for _ in ranks])
    dist.all_to_all_single(given, torch.cat([mine(here, to) for to in ranks]))
    assert_same(given, torch.cat([mine(sender, here) for sender in ranks]))


def assert_all_same(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert_same(one, other)


def wait(works):
    for work in works:
        work.wait()


@check
def tensors_without_elements(job):
    for shape in ((0,), (0, 3), (4, 0, 2)):
        every_collective(job, shape)
    job.exact(torch.ones(1))


@check
def tensors_without_dimensions(job):
    for dtype in (torch.float32, torch.int64):
        every_collective(job, (), dtype)


@check
def tensors_of_odd_shapes(job):
    for shape in ((1,), (1, 1, 1), (2, 3, 4, 5), (1009,)):
        every_collective(job, shape)


@check
def transposed_tensors(job):
    """Dense, but not in row order; layouts for which Gloo is correct too."""

    def mine(*key):
        return values(torch.int64, *key, shape=(3, 4)).t()

    def empty():
        return torch.empty(3, 4, dtype=torch.int64).t()

    total = functools.reduce(torch.add, [mine(rank) for rank in job.ranks])
    mixed = functools.reduce(torch.add, [mine(rank, job.rank) for rank in job.ranks])
    given = mine(job.rank)
    dist.all_reduce(given)
    assert given.stride() == (1, 4)
    assert_same(given, total)
    given = mine(job.rank)
    dist.broadcast(given, 1)
    assert_same(given, mine(1))
    given = [empty() for _ in job.ranks]
    dist.all_gather(given, mine(job.rank))
    assert_all_same(given, [mine(rank) for rank in job.ranks])
    given = torch.empty(3, 4 * job.size, dtype=torch.int64).t()
    dist.all_gather_into_tensor(given, mine(job.rank))
    assert_same(given, torch.cat([mine(rank) for rank in job.ranks]))
    given = empty()
    dist.reduce_scatter(given, [mine(job.rank, part) for part in job.ranks])
    assert_same(given, mixed)
    given = empty()
    dist.reduce_scatter_tensor(given, torch.cat([mine(job.rank, part) for part in job.ranks], 0).t().contiguous().t())
    assert_same(given, mixed)
    given = [empty() for _ in job.ranks] if job.rank == 0 else None
    dist.gather(mine(job.rank), given, 0)
    assert_all_same(given or [], [mine(rank) for rank in job.ranks if job.rank == 0])
    given = [empty() for _ in job.ranks]
    dist.all_to_all(given, [mine(job.rank, to) for to in job.ranks])
    assert_all_same(given, [mine(sender, job.rank) for sender in job.ranks])


@check
def mixed_layouts_in_lists(job):
    """Inputs that are expanded or strided, outputs that are slices of something larger."""
    column = torch.tensor([[float(job.rank)]]).expand(2, 3)
    given = [torch.empty(2, 3) for _ in job.ranks]
    dist.all_gather(given, column)
    assert [x.tolist() for x in given] == [[[float(rank)] * 3] * 2 for rank in job.ranks]

    around = torch.full((job.size, 8), -1.0)
    dist.all_gather([row[::2] for row in around], torch.arange(4.0) + job.rank)
    assert around.tolist() == [[x for i in range(4) for x in (i + rank, -1.0)] for rank in map(float, job.ranks)]

    given = torch.empty(4)
    dist.reduce_scatter(given, [(torch.arange(8.0) + part)[::2] for part in job.ranks])
    assert given.tolist() == [job.size * (2.0 * i + job.rank) for i in range(4)]

    around = torch.full((job.size, 8), -1.0)
    dist.all_to_all([row[::2] for row in around], [torch.arange(8.0)[::2] + job.rank for _ in job.ranks])
    assert around.tolist() == [[x for i in range(4) for x in (2 * i + rank, -1.0)] for rank in map(float, job.ranks)]

    around = torch.full((job.size, 8), -1.0)
    dist.gather(torch.arange(8.0)[::2] + job.rank, [row[::2] for row in around] if job.rank == 0 else None, 0)
    rows = [[x for i in range(4) for x in (2 * i + rank, -1.0)] for rank in map(float, job.ranks)]
    assert around.tolist() == (rows if job.rank == 0 else [[-1.0] * 8] * job.size)


@check
def tensors_with_gaps(job):
    """Views that skip elements: Gloo reads and writes the gaps, so it gets copies here; other backends must be correct.

    They may also refuse, as Gloo does in all_to_all_single, send and recv; on every rank.
    """

    def gappy(fill):
        return torch.full((8,), fill)[::2] if job.backend != "gloo" else torch.full((4,), fill)

    mine = float(job.rank)
    total = float(sum(job.ranks))

    def all_reduce():
        given = gappy(mine)
        dist.all_reduce(given)
        return given, total

    def broadcast():
        given = gappy(mine)
        dist.broadcast(given, 1)
        return given, 1.0

    def reduce():
        given = gappy(mine)
        dist.reduce(given, 0)
        return given, total if job.rank == 0 else None

    def scatter():
        given = gappy(-1.0)
        dist.scatter(given, [gappy(float(rank)) for rank in job.ranks] if job.rank == 0 else None, 0)
        return given, mine

    def reduce_scatter():
        given = gappy(-1.0)
        dist.reduce_scatter(given, [gappy(float(rank)) for rank in job.ranks])
        return given, job.size * mine

    def point_to_point():
        given = gappy(-1.0)
        works = [dist.isend(gappy(mine), job.right), dist.irecv(given, job.left)]
        wait(works)
        return given, float(job.left)

    def all_to_all_single():
        given = torch.empty(2 * job.size)
        source = torch.full((4 * job.size,), mine)
        dist.all_to_all_single(given, source[::2] if job.backend != "gloo" else source[: 2 * job.size])
        return given, torch.arange(float(job.size)).repeat_interleave(2)

    def all_to_all_single_into_gaps():
        around = torch.full((4 * job.size,), -1.0)
        given = around[::2] if job.backend != "gloo" else around[: 2 * job.size]
        dist.all_to_all_single(given, torch.full((2 * job.size,), mine))
        return given, torch.arange(float(job.size)).repeat_interleave(2)

    calls = (all_reduce, broadcast, reduce, scatter, reduce_scatter, point_to_point)
    for call in (*calls, all_to_all_single, all_to_all_single_into_gaps):
        try:
            given, expected = call()
        except REJECTIONS as error:
            if job.backend == "gloo":
                raise
            job.notes.append(f"{call.__name__}: {type(error).__name__}")
            continue
        if expected is not None:
            assert_same(given, torch.zeros_like(given) + expected)
            if given.stride() == (2,):
                gaps = torch.as_strided(given, given.shape, (2,), given.storage_offset() + 1)
                before = mine if call in (all_reduce, broadcast, reduce) else -1.0
                assert gaps.tolist() == [before] * len(given), "the gaps were written to"
    still_works(job)


@check
def slices_at_an_offset(job):
    """A contiguous part of a larger tensor: its neighbours stay unchanged."""
    around = torch.full((10,), -1.0)
    around[3:7] = float(job.rank)
    dist.all_reduce(around[3:7])
    assert around.tolist() == [-1.0] * 3 + [float(sum(job.ranks))] * 4 + [-1.0] * 3
    dist.broadcast(around[9:], 0)
    around[0] = job.rank
    dist.broadcast(around[:1], job.size - 1)
    assert around[0] == job.size - 1
    whole = torch.full((2 * job.size + 2,), -1.0)
    whole[1 + 2 * job.rank : 3 + 2 * job.rank] = float(job.rank)
    dist.all_gather_into_tensor(whole[1:-1], whole[1 + 2 * job.rank : 3 + 2 * job.rank])  # in place, as FSDP does
    assert whole.tolist() == [-1.0, *(float(rank) for rank in job.ranks for _ in range(2)), -1.0]


@check
def large_tensors(job):
    count = 2_000_017
    start = torch.arange(count, dtype=torch.int64)
    given = start + job.rank
    dist.all_reduce(given)
    assert torch.equal(given, start * job.size + sum(job.ranks))
    floats = (start % 1000).float() + job.rank
    dist.all_reduce(floats)  # integers: exact in any order
    assert torch.equal(floats, ((start % 1000) * job.size + sum(job.ranks)).float())
    job.exact(given, floats)
    given = start * (job.rank + 1)
    dist.broadcast(given, job.size - 1)
    assert torch.equal(given, start * job.size)
    part = start[:500_003] + job.rank
    whole = torch.empty(500_003 * job.size, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, part)
    assert all(torch.equal(whole.view(job.size, -1)[rank], start[:500_003] + rank) for rank in job.ranks)
    back = torch.empty_like(part)
    dist.all_to_all_single(whole, torch.cat([part * (to + 1) for to in job.ranks]))
    assert all(
        torch.equal(whole.view(job.size, -1)[rank], (start[:500_003] + rank) * (job.rank + 1)) for rank in job.ranks
    )
    dist.reduce_scatter_tensor(back, torch.cat([part + to for to in job.ranks]))
    assert torch.equal(back, (start[:500_003] + job.rank) * job.size + sum(job.ranks))


# ---------------------------------------------------------------------------------------------
# Barriers


@check
def nobody_leaves_a_barrier_early(job):
    for round_, asynchronous in enumerate((False, True)):
        time.sleep(0.1 * ((job.rank + round_) % job.size))
        entered = time.monotonic()  # one clock for the whole machine
        work = dist.barrier(async_op=asynchronous)
        if asynchronous:
            work.wait()
        left = time.monotonic()
        times = [torch.empty(2, dtype=torch.float64) for _ in job.ranks]
        dist.all_gather(times, torch.tensor([entered, left], dtype=torch.float64))
        assert max(t[0] for t in times) <= min(t[1] for t in times)


# ---------------------------------------------------------------------------------------------
# Sending and receiving


@check
def send_and_receive_every_dtype(job):
    for dtype in (*MOVED, *REFUSED):
        given = torch.empty(5, 3, dtype=dtype)
        if job.rank == 0:
            dist.send(values(dtype, 0), job.right)
            source = dist.recv(given, job.left)
        else:
            source = dist.recv(given, job.left)
            dist.send(values(dtype, job.rank), job.right)
        assert source == job.left
        assert_same(given, values(dtype, job.left))
        job.exact(given)


@check
def tags_tell_messages_apart(job):
    sends = [dist.isend(torch.full((3,), float(tag)), job.right, tag=tag) for tag in (7, 3, 5)]
    given = {tag: torch.empty(3) for tag in (3, 5, 7)}
    works = [dist.irecv(tensor, job.left, tag=tag) for tag, tensor in given.items()]
    wait(reversed(works))
    wait(sends)
    assert {tag: tensor.tolist() for tag, tensor in given.items()} == {tag: [float(tag)] * 3 for tag in (3, 5, 7)}


@check
def messages_with_one_tag_keep_their_order(job):
    sends = [dist.isend(torch.full((1 + 50 * i,), float(i)), job.right) for i in range(20)]
    for i in range(20):
        given = torch.empty(1 + 50 * i)
        assert dist.recv(given, job.left) == job.left
        assert given.tolist() == [float(i)] * (1 + 50 * i)
    wait(sends)


@check
def large_messages_in_both_directions_at_once(job):
    count = 1_500_000
    others = [rank for rank in job.ranks if rank != job.rank]
    source = torch.arange(count, dtype=torch.float32)
    given = {rank: torch.empty(count) for rank in others}
    sends = [dist.isend(source + 2 * job.rank, rank) for rank in others]  # all ranks send before any receives
    receives = [dist.irecv(given[rank], rank) for rank in others]
    wait(sends)
    wait(reversed(receives))
    assert all(torch.equal(given[rank], source + 2 * rank) for rank in others)


@check
def a_receive_may_wait_while_collectives_run(job):
    given = torch.empty(1000)
    pending = dist.irecv(given, job.left, tag=1)
    for _ in range(3):
        still_works(job)
    sending = dist.isend(torch.full((1000,), float(job.rank)), job.right, tag=1)
    dist.barrier()
    pending.wait()
    sending.wait()
    assert given.tolist() == [float(job.left)] * 1000


@check
def a_large_send_may_wait_while_collectives_run(job):
    sending = dist.isend(torch.full((500_000,), float(job.rank)), job.right)
    still_works(job)
    given = torch.empty(500_000)
    dist.recv(given, job.left)
    sending.wait()
    assert torch.equal(given, torch.full((500_000,), float(job.left)))


@check
def receive_from_any_source(job):
    if job.rank == 0:
        seen = []
        for _ in range(job.size - 1):
            given = torch.empty(3)
            source = dist.recv(given)
            assert given.tolist() == [float(source)] * 3
            seen.append(source)
        assert sorted(seen) == list(job.ranks)[1:]
        given = torch.empty(3)
        work = dist.irecv(given, tag=2)
        work.wait()
        assert work._source_rank() == job.size - 1
        assert given.tolist() == [9.0] * 3
    else:
        dist.send(torch.full((3,), float(job.rank)), 0)
        if job.rank == job.size - 1:
            dist.send(torch.full((3,), 9.0), 0, tag=2)


@check
def batches_of_sends_and_receives(job):
    given = [torch.empty(4, i + 1) for i in range(3)]
    ops = [dist.P2POp(dist.irecv, x, job.left) for x in given]
    ops += [dist.P2POp(dist.isend, torch.full((4, i + 1), 10.0 * i + job.rank), job.right) for i in range(3)]
    wait(dist.batch_isend_irecv(ops))
    assert [x.unique().tolist() for x in given] == [[10.0 * i + job.left] for i in range(3)]


# ---------------------------------------------------------------------------------------------
# Objects


@check
def objects(job):
    def thing(rank):
        return {"rank": rank, "text": "x" * (1 + 1000 * rank), "tensor": None, "nested": [(rank, 2.5)]}

    given = [None] * job.size
    dist.all_gather_object(given, thing(job.rank))
    assert given == [thing(rank) for rank in job.ranks]
    for root in job.ranks:
        given = [thing(rank) for rank in job.ranks] if job.rank == root else [None] * job.size
        dist.broadcast_object_list(given, src=root)
        assert given == [thing(rank) for rank in job.ranks]
        given = [None] * job.size if job.rank == root else None
        dist.gather_object(thing(job.rank), given, dst=root)
        assert given == ([thing(rank) for rank in job.ranks] if job.rank == root else None)
        given = [None]
        dist.scatter_object_list(given, [thing(rank) for rank in job.ranks] if job.rank == root else None, src=root)
        assert given == [thing(job.rank)]
    last = job.size - 1
    if job.rank == 0:
        dist.send_object_list([thing(0), "second"], dst=last)
    elif job.rank == last:
        given = [None, None]
        assert dist.recv_object_list(given, src=0) == 0
        assert given == [thing(0), "second"]


# ---------------------------------------------------------------------------------------------
# Several tensors in one call


@check
def coalesced_collectives(job):
    def mine(rank):
        return [values(torch.int64, rank, i, shape=(i + 1, 2)) for i in range(3)]

    tensors = mine(job.rank)
    dist.all_reduce_coalesced(tensors)
    totals = [functools.reduce(torch.add, parts) for parts in zip(*map(mine, job.ranks), strict=True)]
    assert_all_same(tensors, totals)
    tensors = mine(job.rank)
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, async_op=True).wait()
    maxima = [functools.reduce(torch.maximum, parts) for parts in zip(*map(mine, job.ranks), strict=True)]
    assert_all_same(tensors, maxima)
    given = [[torch.empty(i + 1, 2, dtype=torch.int64) for i in range(3)] for _ in job.ranks]
    dist.all_gather_coalesced(given, mine(job.rank))
    for rank in job.ranks:
        assert_all_same(given[rank], mine(rank))
    mixed = rejects(lambda: dist.all_reduce_coalesced([torch.ones(2), torch.ones(2).double()]))
    job.notes.append(f"mixed dtypes: {type(mixed).__name__}")
    still_works(job)


@check
def the_coalescing_manager(job):
    def sums():
        return [torch.full((i + 1,), float(job.rank + i)) for i in range(3)]

    def verify(tensors):
        assert [x.tolist() for x in tensors] == [[float(sum(job.ranks) + i * job.size)] * (i + 1) for i in range(3)]

    tensors = sums()
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    verify(tensors)
    given = [torch.empty(job.size * (i + 1)) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(given, sums(), strict=True):
            dist.all_gather_into_tensor(output, tensor)
    manager.wait()
    for i, output in enumerate(given):
        assert output.tolist() == [float(rank + i) for rank in job.ranks for _ in range(i + 1)]
    given = [torch.empty(i + 1) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(given, sums(), strict=True):
            dist.reduce_scatter_tensor(output, tensor.repeat(job.size))
    manager.wait()
    verify(given)

    def with_device():
        try:
            tensors = sums()
            with dist._coalescing_manager(device=torch.device("cpu")):
                for tensor in tensors:
                    dist.all_reduce(tensor)
        finally:
            dist.distributed_c10d._world.pg_coalesce_state.clear()  # a refusal leaves it behind
        return tensors

    right_or_refused(job, "device", with_device, verify)
    still_works(job)


# ---------------------------------------------------------------------------------------------
# Functional collectives


@check
def functional_collectives(job):
    world = dist.group.WORLD
    mine = torch.arange(4.0 * job.size).view(2 * job.size, 2) + job.rank
    inputs = [torch.arange(4.0 * job.size).view(2 * job.size, 2) + rank for rank in job.ranks]
    total = sum(inputs)
    assert_same(fc.all_reduce(mine, "sum", world) + 0, total)
    assert_same(fc.all_reduce(mine, "max", world) + 0, inputs[-1])
    assert_close(fc.all_reduce(mine, "avg", world) + 0, total / job.size)
    assert_same(mine, inputs[job.rank])
    for dim in (0, 1):
        assert_same(fc.all_gather_tensor(mine, dim, world) + 0, torch.cat(inputs, dim))
    assert_same(fc.reduce_scatter_tensor(mine, "sum", 0, world) + 0, total[2 * job.rank : 2 * job.rank + 2])
    wide = mine.repeat(1, job.size)
    assert_same(fc.reduce_scatter_tensor(wide, "sum", 1, world) + 0, total)
    assert_same(fc.broadcast(mine, 1, world) + 0, inputs[1])
    exchanged = torch.cat([other[2 * job.rank : 2 * job.rank + 2] for other in inputs])
    assert_same(fc.all_to_all_single(mine, None, None, world) + 0, exchanged)
    assert_same(fc.permute_tensor(mine.view(-1), [*list(job.ranks)[1:], 0], world) + 0, inputs[job.left].view(-1))
    pair = [mine, mine[:1] * 2]
    sums = [x + 0 for x in fc.all_reduce_coalesced(pair, "sum", world)]
    assert_all_same(sums, [total, total[:1] * 2])
    gathered = [x + 0 for x in fc.all_gather_into_tensor_coalesced(pair, world)]
    assert_all_same(gathered, [torch.cat(inputs), torch.cat([x[:1] * 2 for x in inputs])])
    (scattered,) = fc.reduce_scatter_tensor_coalesced([mine], "sum", [0], world)
    assert_same(scattered + 0, total[2 * job.rank : 2 * job.rank + 2])


@check
def functional_collectives_have_gradients(job):
    source = torch.ones(3, requires_grad=True)
    gathered = fc.all_gather_tensor_autograd(source * (job.rank + 1), 0, dist.group.WORLD)
    weights = torch.arange(3.0 * job.size)
    (gathered * weights).sum().backward()
    assert_same(source.grad, weights[3 * job.rank : 3 * job.rank + 3] * job.size * (job.rank + 1))
    source = torch.ones(2 * job.size, requires_grad=True)
    scattered = fc.reduce_scatter_tensor_autograd(source * (job.rank + 1), "sum", 0, dist.group.WORLD)
    (scattered * (job.rank + 5)).sum().backward()
    expected = (torch.arange(job.size).repeat_interleave(2) + 5.0) * (job.rank + 1)
    assert_same(source.grad, expected)


# ---------------------------------------------------------------------------------------------
# Groups


@check
def who_is_who(job):
    assert dist.get_backend() == job.backend
    assert dist.get_process_group_ranks(None) == list(job.ranks)
    assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (job.rank, job.size)
    assert dist.is_initialized()
    group = dist.new_group(list(job.ranks))
    assert dist.get_backend(group) == job.backend
    dist.destroy_process_group(group)
    still_works(job)


def a_sum_in(group, members):
    """All members of ``group`` all-reduce their global ranks."""
    given = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(given, group=group)
    assert given.tolist() == [float(sum(members))]


@check
def overlapping_groups(job):
    lists = [[rank] for rank in job.ranks]
    lists += [list(pair) for pair in itertools.combinations(job.ranks, 2)]
    lists += [list(job.ranks)[1:], list(job.ranks)[:-1], list(job.ranks)]
    groups = [(members, dist.new_group(members)) for members in lists]
    for members, group in groups:
        if job.rank in members:
            assert dist.get_rank(group) == members.index(job.rank)
            assert dist.get_process_group_ranks(group) == members
            a_sum_in(group, members)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            given = torch.ones(1)
            assert dist.all_reduce(given, group=group) is None
            assert given.tolist() == [1.0]
    still_works(job)
    for members, group in groups:
        if job.rank in members:
            dist.destroy_process_group(group)
    still_works(job)


@check
def a_group_of_one_does_everything(job):
    groups = [dist.new_group([rank]) for rank in job.ranks]
    group, mine = groups[job.rank], torch.arange(3.0) + job.rank
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        given = mine.clone()
        dist.all_reduce(given, op, group=group)
        assert_same(given, mine)
    for call in (
        lambda x: dist.all_gather([x], mine, group=group),
        lambda x: dist.all_gather_into_tensor(x, mine, group=group),
        lambda x: dist.reduce_scatter(x, [mine], group=group),
        lambda x: dist.reduce_scatter_tensor(x, mine, group=group),
        lambda x: dist.gather(mine, [x], dst=job.rank, group=group),
        lambda x: dist.scatter(x, [mine], src=job.rank, group=group),
        lambda x: dist.all_to_all([x], [mine], group=group),
        lambda x: dist.all_to_all_single(x, mine, group=group),
    ):
        given = torch.full((3,), -1.0)
        call(given)
        assert_same(given, mine)
    dist.barrier(group)
    objects = [None]
    dist.all_gather_object(objects, job.rank, group=group)
    assert objects == [job.rank]


@check
def a_group_without_rank_0_does_everything(job):
    members = list(job.ranks)[1:]
    group = dist.new_group(members)
    if job.rank in members:
        for root in members:
            given = torch.full((2,), float(job.rank))
            dist.broadcast(given, src=root, group=group)  # roots are given by global rank
            assert given.tolist() == [float(root)] * 2
            given = torch.full((2,), float(job.rank))
            dist.broadcast(given, group_src=root - 1, group=group)
            assert given.tolist() == [float(root)] * 2
            given = torch.full((2,), float(job.rank))
            dist.reduce(given, dst=root, group=group)
            if job.rank == root:
                assert given.tolist() == [float(sum(members))] * 2
            parts = [torch.empty(1) for _ in members] if job.rank == root else None
            dist.gather(torch.tensor([float(job.rank)]), parts, dst=root, group=group)
            assert parts is None or [x.item() for x in parts] == members
            given = torch.empty(1)
            parts = [torch.tensor([10.0 * rank]) for rank in members] if job.rank == root else None
            dist.scatter(given, parts, src=root, group=group)
            assert given.item() == 10 * job.rank
        given = torch.empty(len(members))
        dist.all_gather_into_tensor(given, torch.tensor([float(job.rank)]), group=group)
        assert given.tolist() == members
        objects = [None] * len(members)
        dist.all_gather_object(objects, job.rank, group=group)
        assert objects == members
        if len(members) > 1:
            given = torch.empty(1)
            if job.rank == members[0]:
                dist.send(torch.tensor([5.0]), dst=members[-1], group=group)
            elif job.rank == members[-1]:
                assert dist.recv(given, group=group) == members[0]  # any source; reported by global rank
                assert given.item() == 5.0
    else:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
    still_works(job)


@check
def groups_do_not_disturb_each_other(job):
    """Two groups of all ranks, used in opposite orders, and messages with the same tag in both."""
    first, second = dist.new_group(), dist.new_group()
    # Holdfast runs collectives in the order in which they are called, which must be the same everywhere.
    groups = (first, second) if job.rank % 2 == 0 or job.backend == "holdfast" else (second, first)
    works = []
    for group in groups:
        given = torch.full((1000,), 1.0 if group is first else 10.0)
        works.append((dist.all_reduce(given, group=group, async_op=True), given, group))
    for work, given, group in works:
        work.wait()
        assert given.unique().tolist() == [job.size * (1.0 if group is first else 10.0)]
    sends = [dist.isend(torch.full((2,), float(i)), job.right, group=g) for i, g in enumerate((first, second))]
    for i, group in reversed(list(enumerate((first, second)))):
        given = torch.empty(2)
        dist.recv(given, job.left, group=group)
        assert given.tolist() == [float(i)] * 2
    wait(sends)


@check
def halves_work_at_the_same_time(job):
    halves = [list(job.ranks)[: (job.size + 1) // 2], list(job.ranks)[(job.size + 1) // 2 :]]
    groups = [dist.new_group(half) for half in halves]
    which = int(job.rank in halves[1])
    for count in range(1, 30):  # no rank waits for the other half
        given = torch.full((count * 100,), float(job.rank))
        dist.all_reduce(given, group=groups[which])
        assert given.unique().tolist() == [float(sum(halves[which]))]
        given = torch.full((count * 100,), float(job.rank))
        dist.broadcast(given, src=halves[which][-1], group=groups[which])
        assert given.unique().tolist() == [float(halves[which][-1])]


@check
def groups_made_by_their_members_only(job):
    """use_local_synchronization: ranks outside need not call; here they use the time for another group."""
    if job.rank == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        a_sum_in(group, [0])
    else:
        members = list(job.ranks)[1:]
        group = dist.new_group(members, use_local_synchronization=True)
        a_sum_in(group, members)
    still_works(job)


@check
def groups_used_from_two_threads(job):
    if job.backend == "holdfast":  # two threads call in different orders at different ranks: not supported
        return
    groups = [dist.new_group(), dist.new_group()]
    found = []

    def use(which):
        total = 0.0
        for i in range(20):
            given = torch.full((100,), float(i + which))
            dist.all_reduce(given, group=groups[which])
            total += given[0].item()
        found.append((which, total))

    threads = [threading.Thread(target=use, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(which, float(job.size * sum(i + which for i in range(20)))) for which in range(2)]


@check
def a_mesh_and_distributed_tensors(job):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    shape = (2, 2) if job.size == 4 else (job.size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    grid = torch.arange(job.size).view(shape)
    here = (grid == job.rank).nonzero()[0].tolist()
    assert mesh.get_coordinate() == here or list(mesh.get_coordinate()) == here
    a_sum_in(mesh.get_group("rows"), grid[:, here[1]].tolist())
    a_sum_in(mesh.get_group("columns"), grid[here[0]].tolist())
    whole = torch.arange(7.0 * 6).view(7, 6)  # 7 rows: shards of unequal size
    rows = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    assert_same(rows.full_tensor(), whole)
    assert_same(rows.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(), whole)
    assert_same(rows.redistribute(mesh, [Shard(0), Shard(1)]).full_tensor(), whole)
    assert_same((rows.t() @ rows).full_tensor(), whole.t() @ whole)
    partial = rows.sum()
    assert isinstance(partial.placements[0], Partial)
    assert partial.full_tensor() == whole.sum()


# ---------------------------------------------------------------------------------------------
# Work handles and futures


@check
def several_collectives_in_flight(job):
    for order in (list, reversed):
        given = [torch.full((1000 * (i + 1),), float(job.rank + i)) for i in range(12)]
        works = [dist.all_reduce(x, async_op=True) for x in given]
        wait(order(works))
        assert all(work.is_completed() for work in works)
        assert [x.unique().tolist() for x in given] == [[float(sum(job.ranks) + i * job.size)] for i in range(12)]
    summed, copied, gathered = torch.ones(5), torch.full((5,), float(job.rank)), torch.empty(job.size)
    works = [
        dist.all_reduce(summed, async_op=True),
        dist.broadcast(copied, 1, async_op=True),
        dist.all_gather_into_tensor(gathered, torch.tensor([float(job.rank)]), async_op=True),
        dist.barrier(async_op=True),
    ]
    wait(works)
    assert summed.tolist() == [float(job.size)] * 5
    assert copied.tolist() == [1.0] * 5
    assert gathered.tolist() == list(job.ranks)


@check
def work_goes_on_without_wait(job):
    given = torch.ones(10)
    work = dist.all_reduce(given, async_op=True)
    assert eventually(work.is_completed)
    assert given.tolist() == [float(job.size)] * 10
    assert work.wait() is True
    assert work.wait() is True
    assert work.wait(datetime.timedelta(seconds=5)) is True
    assert work.is_success()
    assert_all_same(work.result(), [given])


@check
def handles_may_be_dropped(job):
    kept = []
    for i in range(10):
        given = torch.full((10_000,), float(i))
        kept.append(given)
        dist.all_reduce(given, async_op=True)
        dist.all_reduce(torch.ones(10_000), async_op=True)  # this tensor is not kept either
    dist.barrier(async_op=True)
    assert eventually(lambda: all((x == i * job.size).all() for i, x in enumerate(kept)))
    still_works(job)


@check
def every_collective_is_asynchronous(job):
    """One rank comes last: it waits until the calls of all other ranks have returned."""
    mine, other = torch.full((4,), float(job.rank)), torch.empty(4)
    root = job.size - 1

    def lists(only=None):
        return [torch.empty(4) for _ in job.ranks] if only is None or job.rank == only else None

    def copies(only=None):
        return [mine.clone() for _ in job.ranks] if only is None or job.rank == only else None

    calls = [
        lambda: dist.all_reduce(mine.clone(), async_op=True),
        lambda: dist.broadcast(mine.clone(), root, async_op=True),
        lambda: dist.reduce(mine.clone(), root, async_op=True),
        lambda: dist.all_gather(lists(), mine, async_op=True),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * job.size), mine, async_op=True),
        lambda: dist.gather(mine, lists(root), root, async_op=True),
        lambda: dist.scatter(other, copies(root), root, async_op=True),
        lambda: dist.reduce_scatter(other.clone(), copies(), async_op=True),
        lambda: dist.reduce_scatter_tensor(other.clone(), mine.repeat(job.size), async_op=True),
        lambda: dist.all_to_all(lists(), copies(), async_op=True),
        lambda: dist.all_to_all_single(torch.empty(4 * job.size), mine.repeat(job.size), async_op=True),
        lambda: dist.barrier(async_op=True),
    ]
    keys = [f"returned {rank}" for rank in job.ranks if rank != root]
    if job.rank == root:
        returned = eventually(lambda: job.store.check(keys))
        works = [call() for call in calls]
        assert returned, "a call waited for the last rank"
    else:
        works = [call() for call in calls]
        assert not works[0].is_completed()
        job.store.set(f"returned {job.rank}", "yes")
    wait(works)
    assert other.tolist() == [float(root)] * 4


@check
def futures_chain(job):
    given = torch.full((3,), 2.0)
    future = dist.all_reduce(given, async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().tolist() == [20.0 * job.size] * 3
    second = torch.full((3,), float(job.rank))
    seen = []
    future = dist.broadcast(second, 1, async_op=True).get_future()
    future.add_done_callback(lambda f: seen.append(f.value()[0].tolist()))
    future.wait()
    assert eventually(lambda: seen)  # the callback may run after wait has returned
    assert seen == [[1.0] * 3]
    given = [torch.ones(2) * i for i in range(5)]
    futures = [dist.all_reduce(x, async_op=True).get_future() for x in given]
    done = torch.futures.collect_all(futures).wait()
    assert [f.value()[0].tolist() for f in done] == [[float(i * job.size)] * 2 for i in range(5)]
    parts = [torch.empty(1) for _ in job.ranks]
    future = dist.all_gather(parts, torch.tensor([float(job.rank)]), async_op=True).get_future()
    value = future.wait()
    assert [x.item() for x in torch.utils._pytree.tree_leaves(value)] == list(job.ranks)
    late = future.then(lambda f: "after the end")  # added to a future that is done
    assert late.wait() == "after the end"


# ---------------------------------------------------------------------------------------------
# Training


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(*key, rows=4):
    return values(torch.float32, "batch", *key, shape=(rows, 6)), values(torch.float32, "goal", *key, shape=(rows, 3))


def loss_of(model, *key):
    source, goal = batch(*key)
    return F.mse_loss(model(source), goal)


def expected_gradients(job, model, steps=1):
    """The gradients of one process that sees all batches: the mean over the ranks, summed over the steps."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for step, rank in itertools.product(range(steps), job.ranks):
        (loss_of(model, step, rank) / job.size).backward()
    return [p.grad for p in model.parameters()]


def assert_gradients(job, model, expected, tolerance=1e-5):
    given = [p.grad for p in model.parameters()]
    for one, other in zip(given, expected, strict=True):
        assert_close(one, other, tolerance)
    job.sums(*given)


@check
def collectives_from_gradient_hooks(job):
    for asynchronous in (True, False):
        model, works = small_model(), []

        def hook(parameter, works=works, asynchronous=asynchronous):
            works.append(dist.all_reduce(parameter.grad, async_op=asynchronous))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        expected = expected_gradients(job, small_model())
        loss_of(model, 0, job.rank).backward()
        assert len(works) == len(expected)
        if asynchronous:
            wait(works)
        for parameter in model.parameters():
            parameter.grad /= job.size
        assert_gradients(job, model, expected)


@check
def ddp_averages_gradients(job):
    for options in ({}, {"bucket_cap_mb": 0.0005}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = DistributedDataParallel(small_model(seed=job.rank), **options)  # rank 0's weights are broadcast
        assert_all_same(list(model.module.parameters()), list(small_model().parameters()))
        expected = expected_gradients(job, small_model())
        for _ in range(3):  # buckets are rebuilt after the first
            model.zero_grad()
            loss_of(model, 0, job.rank).backward()
            assert_gradients(job, model.module, expected)


@check
def ddp_and_the_script_add_in_one_backward_pass(job):
    model = DistributedDataParallel(small_model(), bucket_cap_mb=0.0005)
    expected = expected_gradients(job, small_model())
    other = []

    def add(_gradient):
        numbers = torch.full((100_000,), float(job.rank + 1))
        dist.all_reduce(numbers)
        other.append(numbers)

    for layer in model.module.children():
        layer.register_forward_hook(lambda _module, _inputs, out: out.register_hook(add) and None)
    for _ in range(3):
        model.zero_grad()
        loss_of(model, 0, job.rank).backward()
        assert_gradients(job, model.module, expected)
    assert len(other) >= 6
    assert all((numbers == sum(rank + 1 for rank in job.ranks)).all() for numbers in other)


@check
def ddp_trains_as_one_process_does(job):
    model, alone = DistributedDataParallel(small_model()), small_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        for rank in job.ranks:
            (loss_of(alone, step, rank) / job.size).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert_close(one, other)
    job.sums(*model.module.parameters())


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, source, which):
        return self.layers[which](source)


@check
def ddp_finds_unused_parameters(job):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        model(batch(step, job.rank)[0], job.rank % 2).square().mean().backward()  # no rank uses layer 2
        alone = Branches()
        for rank in job.ranks:
            (alone(batch(step, rank)[0], rank % 2).square().mean() / job.size).backward()
        for one, other in zip(model.module.parameters(), alone.parameters(), strict=True):
            expected = torch.zeros_like(one) if other.grad is None else other.grad
            assert_close(torch.zeros_like(one) if one.grad is None else one.grad, expected)
        job.sums(*(p.grad for p in model.module.layers[:2].parameters()))


@check
def ddp_accumulates_without_sync(job):
    model = DistributedDataParallel(small_model())
    with model.no_sync():
        for step in range(2):
            loss_of(model, step, job.rank).backward()
    own = [p.grad.clone() for p in model.parameters()]
    alone = small_model()
    for step in range(2):
        loss_of(alone, step, job.rank).backward()
    assert_all_same(own, [p.grad for p in alone.parameters()])
    loss_of(model, 2, job.rank).backward()
    assert_gradients(job, model.module, expected_gradients(job, small_model(), steps=3))


@check
def ddp_and_buffers(job):
    def normalised():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    for broadcast in (True, False):
        model, alone = DistributedDataParallel(normalised(), broadcast_buffers=broadcast), normalised()
        for step in range(3):
            loss_of(model, step, job.rank).backward()
            with torch.no_grad():
                last = step == 2 or not broadcast
                loss_of(alone, step, job.rank if last else 0)  # each forward pass begins with rank 0's buffers
        for one, other in zip(model.module.buffers(), alone.buffers(), strict=True):
            assert_close(one, other)
        job.exact(model.module[1].num_batches_tracked)


@check
def ddp_communication_hooks(job):
    def python_hook(state, bucket):
        state.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(job.size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def bfloat16_hook(state, bucket):
        narrow = bucket.buffer().to(torch.bfloat16).div_(job.size)

        def widen(future):
            bucket.buffer().copy_(future.value()[0])
            return bucket.buffer()

        return dist.all_reduce(narrow, async_op=True).get_future().then(widen)

    expected = expected_gradients(job, small_model())
    seen = []
    hooks = [
        (python_hook, 1e-5),
        (bfloat16_hook, 3e-2),
        (default_hooks.allreduce_hook, 1e-5),
        (default_hooks.fp16_compress_hook, 3e-3),
    ]
    for hook, tolerance in hooks:
        model = DistributedDataParallel(small_model(), bucket_cap_mb=0.0005)
        model.register_comm_hook(seen if hook is python_hook else None, hook)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, 0, job.rank).backward()
            assert_gradients(job, model.module, expected, tolerance)
    assert max(seen) > 0, "one bucket only"
    if job.backend == "holdfast":  # they need a future that only a C++ backend can create
        return
    for built_in, tolerance in (
        (dist.BuiltinCommHookType.ALLREDUCE, 1e-5),
        (dist.BuiltinCommHookType.FP16_COMPRESS, 3e-3),
    ):
        model = DistributedDataParallel(small_model())
        model._register_builtin_comm_hook(built_in)
        loss_of(model, 0, job.rank).backward()
        for parameter, gradient in zip(
            model.parameters(), expected, strict=True
        ):  # not compared bitwise with other ranks
            assert_close(parameter.grad, gradient, tolerance)


@check
def ddp_joins_ranks_that_end_early(job):
    model, alone = DistributedDataParallel(small_model()), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + job.rank):
            optimizer.zero_grad()
            loss_of(model, step, job.rank).backward()
            optimizer.step()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(1 + job.size):
        optimizer.zero_grad()
        for rank in job.ranks:
            if step < 2 + rank:
                (loss_of(alone, step, rank) / job.size).backward()
        optimizer.step()
    for one, other in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert_close(one, other)
    job.shared(*model.module.parameters())


@check
def fully_sharded_training(job):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (job.size,))
    cases = [({}, 1e-5), ({"reshard_after_forward": False}, 1e-5)]
    cases.append(({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, 1e-2))
    for options, tolerance in cases:
        model, alone = small_model(), small_model()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step, job.rank).backward()
            for rank in job.ranks:
                (loss_of(alone, step, rank) / job.size).backward()
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            whole = one.full_tensor()
            assert_close(whole, other, tolerance)
            job.sums(whole)


# ---------------------------------------------------------------------------------------------
# Refusals

MISUSES = {}


def misuse(function):
    """Add ``function(job, zeros)``: a call that every backend refuses, on all ranks, before anything is sent."""
    MISUSES[function.__name__] = function
    return function


@misuse
def broadcast_from_nobody(job, zeros):
    dist.broadcast(zeros(2), src=job.size + 3)


@misuse
def broadcast_from_minus_one(job, zeros):
    dist.broadcast(zeros(2), src=-1)


@misuse
def broadcast_from_nobody_in_the_group(job, zeros):
    dist.broadcast(zeros(2), group_src=job.size)


@misuse
def reduce_to_nobody(job, zeros):
    dist.reduce(zeros(2), dst=job.size)


@misuse
def gather_to_nobody(job, zeros):
    dist.gather(zeros(2), None, dst=job.size)


@misuse
def scatter_from_nobody(job, zeros):
    dist.scatter(zeros(2), None, src=job.size)


@misuse
def gather_with_the_list_in_the_wrong_place(job, zeros):
    dist.gather(zeros(2), None if job.rank == 0 else [zeros(2) for _ in job.ranks], dst=0)


@misuse
def scatter_with_the_list_in_the_wrong_place(job, zeros):
    dist.scatter(zeros(2), None if job.rank == 0 else [zeros(2) for _ in job.ranks], src=0)


@misuse
def all_gather_of_two_dtypes(job, zeros):
    dist.all_gather([zeros(2).to(torch.float64 if rank else torch.float32) for rank in job.ranks], zeros(2))


@misuse
def all_gather_into_another_dtype(job, zeros):
    dist.all_gather([zeros(2).double() for _ in job.ranks], zeros(2))


@misuse
def all_gather_into_too_few(job, zeros):
    dist.all_gather([zeros(2) for _ in list(job.ranks)[1:]], zeros(2))


@misuse
def all_gather_into_too_many(job, zeros):
    dist.all_gather([zeros(2) for _ in range(job.size + 1)], zeros(2))


@misuse
def all_gather_into_wrong_sizes(job, zeros):
    dist.all_gather([zeros(3) for _ in job.ranks], zeros(2))


@misuse
def all_gather_into_a_tensor_too_large(job, zeros):
    dist.all_gather_into_tensor(zeros(2 * job.size + 1), zeros(2))


@misuse
def all_gather_into_a_tensor_of_another_dtype(job, zeros):
    dist.all_gather_into_tensor(zeros(2 * job.size).double(), zeros(2))


@misuse
def reduce_scatter_of_too_few(job, zeros):
    dist.reduce_scatter(zeros(2), [zeros(2) for _ in list(job.ranks)[1:]])


@misuse
def reduce_scatter_into_wrong_size(job, zeros):
    dist.reduce_scatter(zeros(2), [zeros(3) for _ in job.ranks])


@misuse
def reduce_scatter_into_another_dtype(job, zeros):
    dist.reduce_scatter(zeros(2).double(), [zeros(2) for _ in job.ranks])


@misuse
def reduce_scatter_of_a_tensor_too_large(job, zeros):
    dist.reduce_scatter_tensor(zeros(2), zeros(2 * job.size + 1))


@misuse
def reduce_scatter_of_a_tensor_into_another_dtype(job, zeros):
    dist.reduce_scatter_tensor(zeros(2).double(), zeros(2 * job.size))


@misuse
def all_to_all_of_too_few(job, zeros):
    dist.all_to_all([zeros(2) for _ in list(job.ranks)[1:]], [zeros(2) for _ in list(job.ranks)[1:]])


@misuse
def all_to_all_into_another_dtype(job, zeros):
    dist.all_to_all([zeros(2).double() for _ in job.ranks], [zeros(2) for _ in job.ranks])


@misuse
def all_to_all_single_with_wrong_sums(job, zeros):
    dist.all_to_all_single(zeros(2 * job.size), zeros(2 * job.size), [1] * job.size, [1] * job.size)


@misuse
def all_to_all_single_with_too_few_parts(job, zeros):
    dist.all_to_all_single(zeros(4), zeros(4), [4] + [0] * (job.size - 2), [4] + [0] * (job.size - 2))


@misuse
def all_to_all_single_into_another_dtype(job, zeros):
    dist.all_to_all_single(zeros(job.size).double(), zeros(job.size))


@misuse
def all_reduce_of_a_list(job, zeros):
    dist.all_reduce([zeros(2)])


@misuse
def send_to_oneself(job, zeros):
    dist.send(zeros(2), job.rank)


@misuse
def broadcast_of_a_sparse_tensor(job, zeros):
    dist.broadcast(zeros(4).to_sparse(), 0)


@misuse
def all_gather_of_a_sparse_tensor(job, zeros):
    dist.all_gather([zeros(4).to_sparse() for _ in job.ranks], zeros(4).to_sparse())


@misuse
def maximum_of_a_sparse_tensor(job, zeros):
    dist.all_reduce(zeros(4).to_sparse(), dist.ReduceOp.MAX)


@check
def misuse_is_refused_and_the_group_goes_on(job):
    for name, call in MISUSES.items():
        try:
            error = rejects(lambda call=call: call(job, torch.zeros))
        except AssertionError as silent:
            message = f"{name} was not refused"
            raise AssertionError(message) from silent
        job.notes.append(f"{name}: {type(error).__name__}")
        still_works(job)


@check
def the_root_refuses_a_wrong_list(job):
    """Only the root detects these; the other ranks do not call, and the group still works."""

    def zeros(*sizes):
        return [torch.zeros(size) for size in sizes]

    if job.rank == 0:
        two = [2] * job.size
        wide = [torch.zeros(2, dtype=torch.float64 if rank else torch.float32) for rank in job.ranks]
        for call in (dist.gather, dist.scatter):
            for parts in (zeros(*two[1:]), zeros(*[3] * job.size), wide):
                rejects(lambda call=call, parts=parts: call(torch.zeros(2), parts, 0))
    still_works(job)


@check
def sparse_sums(job):
    index = torch.tensor([[0, job.rank + 1]])
    sparse = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (job.size + 2,), check_invariants=True)

    def verify(result):
        dense = result.to_dense() if result.is_sparse else result
        assert dense.tolist() == [float(job.size), *[2.0] * job.size, 0.0]

    dist.all_reduce(sparse)
    verify(sparse)
    if job.backend != "gloo":  # which adds the bits of one dtype to those of the other
        other = torch.float32 if job.rank else torch.int32
        with contextlib.suppress(ScriptError):
            dist.all_reduce(torch.zeros(4, dtype=other).to_sparse())
            raise AssertionError("sparse tensors of two dtypes were added")
    still_works(job)


@check
def a_monitored_barrier_is_passed_and_names_the_missing_ranks(job):
    limit, groups = datetime.timedelta(seconds=30), [dist.new_group() for _ in range(3)]  # Gloo's break at a failure
    dist.monitored_barrier(groups[0], limit)
    dist.monitored_barrier(groups[0], limit, wait_all_ranks=True)
    if job.rank == 0:
        short = datetime.timedelta(seconds=0.3)
        first = rejects(lambda: dist.monitored_barrier(groups[0], short))
        assert "Rank 1 failed to pass monitoredBarrier in 300 ms" in str(first)
        every = rejects(lambda: dist.monitored_barrier(groups[1], short, wait_all_ranks=True))
        assert f"{', '.join(map(str, range(1, job.size)))} failed to pass monitoredBarrier" in str(every)
        begun = time.monotonic()
        assert "timed out" in str(rejects(lambda: dist.monitored_barrier(groups[2], datetime.timedelta(0))))
        assert time.monotonic() - begun < 5
    still_works(job)


@check
def the_profiler_sees_collectives(job):
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2))
        dist.barrier()
    seen = {event.name: event for event in profile.function_events if event.name.startswith(f"{job.backend}:")}
    assert seen[f"{job.backend}:all_reduce"].input_shapes == [[3, 2]]
    assert seen[f"{job.backend}:all_reduce"].is_async
    assert f"{job.backend}:barrier" in seen


@check
def a_peer_that_does_not_exist(job):
    """Gloo waits for it until its timeout, and crashes in irecv, so only the root checks above are called."""
    if job.backend != "gloo":
        rejects(lambda: dist.isend(torch.zeros(2), job.size + 1).wait())
        rejects(lambda: dist.irecv(torch.zeros(2), job.size + 1).wait())
    still_works(job)


@check
def a_collective_that_others_never_join_times_out(job):
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if job.rank == 0:
        begun = time.monotonic()
        rejects(lambda: dist.all_reduce(torch.ones(2), group=group))
        assert 0.5 < time.monotonic() - begun < 15
    still_works(job)  # the other groups still work


# ---------------------------------------------------------------------------------------------
# Running them


def initialise(backend):
    if backend == "holdfast":
        import holdfast.distributed  # noqa: F401  # registers it
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30))


def run(job, name):
    """Run one check; return its JSON line."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    job.start()
    begun = time.monotonic()
    line = {"check": name, "rank": job.rank}
    try:
        CHECKS[name](job)
    except Exception:  # the next check may succeed, and is worth running
        line["error"] = traceback.format_exc()
        sys.stderr.write(f"rank {job.rank}: {name}\n{line['error']}")
    return line | job.results() | {"seconds": round(time.monotonic() - begun, 3)}


def failed_somewhere(job, line):
    """Synchronise with the other workers, so that an error in one check does not affect the next."""
    name = line["check"]
    job.store.set(f"{name} {job.rank}", "failed" if "error" in line else "passed")
    keys = [f"{name} {rank}" for rank in job.ranks]
    job.store.wait(keys, datetime.timedelta(seconds=DEADLINE_S))
    return any(job.store.get(key) == b"failed" for key in keys)


def fork_ranks(count):
    """Return in so many new processes, each with its rank; this one ends with them."""
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(name)  # once for all
    os.environ["WORLD_SIZE"] = str(count)
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ["RANK"] = str(rank)
            return
    for _ in range(count):
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            time.sleep(5)
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
    sys.exit()


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("--ranks", type=int, help="start so many processes; else this one is a rank")
    parser.add_argument("names", nargs="*", default=list(CHECKS))
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # many functions are deprecated in some release
    torch.set_num_threads(1)
    if args.ranks:
        fork_ranks(args.ranks)
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    initialise(args.backend)
    folder = os.environ.get(FOLDER)
    job = Job(args.backend, folder)
    failed = False
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(Path(folder, f"rank-{job.rank}.jsonl").open("w")) if folder else sys.stdout
        for name in args.names:
            line = run(job, name)
            failed |= "error" in line
            print(json.dumps(line), file=output, flush=True)
            if failed_somewhere(job, line):
                still_works(job)
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    faulthandler.cancel_dump_traceback_later()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
