"""The sums of ``hosts_worker.py``, and what they are when one process adds."""

import hashlib

import torch

from holdfast.comm.allreduce import adding

SLICES, LENGTH = 7, 100_003


def terms_of(number):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(number)) * 10.0**number


def expected(order):
    out = torch.empty(LENGTH)
    adding.ORDERS[order]([(n, terms_of(n)) for n in range(SLICES)], out)
    return out


def sha256(numbers):
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
