"""NCCL through ``nccl4py``. **This module has never run**: it was written from the package's source and documentation.

``nccl4py`` and not torch's process groups, because these offer no communicator that can be aborted without their private
classes. It is not installed with Holdfast.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.comm.allreduce.mover import Copies
from holdfast.comm.allreduce.nccl import FORCED, refuse_version
from holdfast.comm.base import Placed
from holdfast.errors import ConfigError


class NcclLibrary:
    """NCCL on one device; see :class:`~holdfast.comm.allreduce.nccl.Library`."""

    def __init__(self, nccl: Any, device: torch.device) -> None:
        self._nccl = nccl
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._communicators: list[tuple[int, Any]] = []

    def make_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, place: int, identity: bytes, generation: int) -> Any:
        """See :meth:`~holdfast.comm.allreduce.nccl.Library.connect`. NCCL takes the current device of the calling thread, which this sets."""
        config = self._nccl.NCCLConfig(blocking=False)
        with torch.cuda.device(self._device):
            made = self._nccl.Communicator.init(size, place, self._nccl.UniqueId.from_bytes(identity), config)
        self._communicators.append((generation, made))
        return made

    def is_ready(self, communicator: Any) -> bool:
        if not communicator.is_valid:
            raise RuntimeError("NCCL error: communicator was aborted")
        state = communicator.get_async_error()
        if state.name not in ("Success", "InProgress"):
            raise RuntimeError(f"NCCL error: {self._nccl.get_error_string(state)}")
        return bool(state.name == "Success")

    def move(self, communicator: Any, send: Copies, receive: Placed) -> Iterator[None]:
        """See :meth:`~holdfast.comm.allreduce.nccl.Library.move`. Nothing is queued behind NCCL's work before NCCL has accepted it."""
        with torch.cuda.stream(self._stream):
            gives = [(places, data.to(self._device, non_blocking=True)) for places, data in send]
            takes = [(place, data, torch.empty_like(data, device=self._device)) for place, data in receive]
            with self._nccl.group():
                for places, data in gives:
                    for place in places:
                        communicator.send(data, place, stream=self._stream.cuda_stream)
                for place, _, data in takes:
                    communicator.recv(data, place, stream=self._stream.cuda_stream)
        while not self.is_ready(communicator):
            yield
        with torch.cuda.stream(self._stream):
            for _, out, data in takes:
                out.copy_(data, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        while not (self.is_ready(communicator) and done.query()):
            yield

    def abort(self, generation: int) -> None:
        """See :meth:`~holdfast.comm.allreduce.nccl.Library.abort`. Then waits until the device has ended its work."""
        aborted = [made for number, made in self._communicators if number <= generation]
        self._communicators = [(number, made) for number, made in self._communicators if number > generation]
        with self._nccl.group():
            for communicator in aborted:
                communicator.abort()
        if aborted:
            self._stream.synchronize()


@functools.cache
def library_of(device: torch.device) -> NcclLibrary:
    """Return NCCL on ``device``, and set the variables in :data:`FORCED`.

    Raises:
        ConfigError: if it cannot be used, with the reason.
    """
    refused = "between_hosts is nccl, which cannot be used: "
    instead = "; or leave between_hosts at fabric"
    if device.type != "cuda":
        raise ConfigError(f"{refused}the model is on {device}, and not on an NVIDIA GPU{instead}")
    if not torch.cuda.is_available():
        raise ConfigError(f"{refused}this process cannot use CUDA{instead}")
    try:
        nccl: Any = importlib.import_module("nccl.core")
        installed = nccl.get_version().libnccl
    except ImportError:
        raise ConfigError(f"{refused}nccl4py is not installed: pip install 'nccl4py[cu13]'{instead}") from None
    if installed is None:
        raise ConfigError(f"{refused}libnccl is not installed: pip install 'nccl4py[cu13]'{instead}")
    if why := refuse_version(installed.version.release):
        raise ConfigError(f"{refused}{why}{instead}")
    os.environ.update(FORCED)
    return NcclLibrary(nccl, device)
