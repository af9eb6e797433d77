"""Shared by the workers of the peers: the digits CNN, its data, a diary, and death on request. Plain torch.

Environment variables set by the benchmark: PEER_DATA, an npz file with ``x`` and ``y``; PEER_DIARY, the folder for the
workers' diaries; PEER_ORDERS, a folder in which the benchmark orders deaths, or nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

BATCH = 32
"""Samples of one worker: with four workers 128 in a step, as in Holdfast's job."""

_PR_SET_PDEATHSIG = 1


class Diary:
    """Appends lines with the time of the monotonic clock, which all processes of a machine share.

    Args:
        rank: Rank of the worker; each process has its own file.
    """

    def __init__(self, rank: int) -> None:
        path = Path(os.environ["PEER_DIARY"], f"{rank}-{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._always = {"rank": rank, "pid": os.getpid()}

    def note(self, event: str, **more: Any) -> None:
        """Write one line unbuffered: a SIGKILL loses nothing that was written."""
        line = {"t_s": time.monotonic(), "event": event, **self._always, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Death:
    """Dies by SIGKILL when the benchmark orders it: a file named after the rank, which holds the phase.

    Args:
        rank: Rank that dies.
        diary: Receives a line just before.
    """

    def __init__(self, rank: int, diary: Diary) -> None:
        self._order = Path(os.environ["PEER_ORDERS"], f"die-{rank}") if os.environ.get("PEER_ORDERS") else None
        self._diary = diary
        self._phase = ""
        self._step = -1

    @property
    def may_come(self) -> bool:
        """Whether deaths can be ordered at all."""
        return self._order is not None

    def look(self, step: int) -> None:
        """Check for an order; call this once a step."""
        self._step = step
        if self._order is not None and self._order.exists():
            self._phase = self._order.read_text()
            self._order.unlink()

    def reach(self, phase: str) -> None:
        """Declare that this phase of the step is reached."""
        if phase == self._phase:
            self._diary.note("fault", phase=phase, step=self._step)
            os.kill(os.getpid(), signal.SIGKILL)

    def lurk_in_backward(self, model: nn.Sequential) -> None:
        """Make the middle of the backward pass call :meth:`reach`."""

        def forward_hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            if self._phase == "backward":
                output.register_hook(lambda _gradient: self.reach("backward"))

        model[len(model) // 2].register_forward_hook(forward_hook)


def die_with_parent() -> None:
    """Make this process end when its parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def make_data() -> TensorDataset:
    """Return the images that the benchmark wrote."""
    with np.load(os.environ["PEER_DATA"]) as arrays:
        return TensorDataset(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))


def make_model() -> nn.Sequential:
    """Return the CNN of ``holdfast_lab.workloads`` for 8x8 images: 55,114 parameters.

    With PEER_STATE_BYTES: an MLP that has so many bytes together with its momentum.
    """
    torch.manual_seed(0)
    if state_bytes := int(os.environ.get("PEER_STATE_BYTES", "0")):
        width = max(1, round((state_bytes / 8 / 4) ** 0.5))
        layers = [nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 10)]
        return nn.Sequential(nn.Flatten(), *layers)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(512, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``holdfast_lab.workloads``."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(
    data: TensorDataset, sampler: DistributedSampler[Any], *, skip: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield mini-batches of this worker's part, epoch after epoch, without the first ``skip``.

    Each is indexed from the tensors directly, which is the cheapest way to load; an incomplete last batch is dropped.
    """
    per_epoch = len(sampler) // BATCH
    epoch, skip = divmod(skip, per_epoch)
    while True:
        sampler.set_epoch(epoch)
        ids = torch.tensor(list(sampler))
        for chunk in ids.split(BATCH)[skip:per_epoch]:
            yield data.tensors[0][chunk], data.tensors[1][chunk]
        epoch, skip = epoch + 1, 0
