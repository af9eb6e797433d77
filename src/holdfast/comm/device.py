"""Devices: where a model computes, and how its gradients reach the memory that workers share.

Workers add gradients in host memory (:mod:`~holdfast.comm.allreduce.shm`), where a model on the CPU writes them itself.
For a model on any other device :class:`~holdfast.comm.allreduce.staged.StagedAllReduce` copies them there and back.
These copies run beside the computation, so whatever uses their memory must wait for them: see :class:`Wait`.
"""

from __future__ import annotations

import enum
import functools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from holdfast.comm.allreduce.adding import MeanDivisor, Terms
from holdfast.comm.allreduce.ordered_add import add_by_torch, ordered_add
from holdfast.errors import ConfigError, JobError

DeviceEvent = Any
"""A point in a stream, complete once all work before it is; only the device that made it knows its type."""


class DeviceStream(enum.Enum):
    """A queue of work of a device. Work in one stream runs in order, and beside that of the others."""

    COMPUTE = enum.auto()
    """What the script and the optimizer compute."""
    TO_HOST = enum.auto()
    """Copies from the device to host memory."""
    TO_DEVICE = enum.auto()
    """Copies from host memory to the device."""


class Wait(enum.Enum):
    """Why something waits for an event; the value names the accident that happens without the wait."""

    COMPUTED = "a term is copied to the host before its gradient is complete"
    COPIED = "workers add a term that has not arrived in host memory"
    SENT = "workers write the next result while the last one is still being copied to the device"
    CONSUMED = "a result overwrites gradients that the optimizer still reads"
    ARRIVED = "the optimizer reads a result that has not arrived on the device"
    UNPINNED = "host memory is unpinned while it is still being copied to the device"


class Device(ABC):
    """The memory in which a model computes, and the streams that copy it.

    Args:
        device: Device of the model's tensors.
    """

    is_host: ClassVar[bool] = False
    """The memory is host memory, so gradients are added where the model writes them."""
    adds: ClassVar[bool] = True
    """A process that runs all workers adds gradients in this memory, and copies nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return zeroed memory of the device, bytes. Once freed it is reused only after all copies that use it."""

    @abstractmethod
    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return host memory for copies that do not block the caller, bytes; freed, it is reused only after them."""

    @abstractmethod
    def pin(self, memory: torch.Tensor) -> None:
        """Prepare host memory for copies that do not block the caller; without it they are correct, but block."""

    @abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """Undo :meth:`pin`. No copy may be using the memory."""

    @abstractmethod
    def mark(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event that is complete once everything queued in ``stream`` so far is."""

    @abstractmethod
    def hold(self, stream: DeviceStream, event: DeviceEvent, why: Wait) -> None:
        """Make everything queued in ``stream`` from now on wait for ``event``; does not block the caller."""

    @abstractmethod
    def wait(self, event: DeviceEvent, why: Wait) -> None:
        """Block the caller until ``event`` is complete."""

    def synchronize(self) -> None:
        """Block the caller until everything computed so far is complete."""
        torch.accelerator.synchronize(self.device)

    @abstractmethod
    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Queue a copy between host memory and the device; the host memory must exist until it is complete."""

    @abstractmethod
    def ordered_add(self, terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None) -> None:
        """Queue an addition of terms in this memory, in the stream of the computation.

        See :func:`holdfast.comm.allreduce.ordered_add.ordered_add`, whose bits every device gives.
        """


class CpuDevice(Device):
    """Host memory. Every operation is complete when its call returns, so there is nothing to wait for."""

    is_host = True

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def mark(self, stream: DeviceStream) -> DeviceEvent:
        """Return an event that is complete."""
        return None

    def hold(self, stream: DeviceStream, event: DeviceEvent, why: Wait) -> None:
        """Do nothing."""

    def wait(self, event: DeviceEvent, why: Wait) -> None:
        """Return immediately."""

    def synchronize(self) -> None:
        """Return immediately."""

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Copy immediately."""
        into.copy_(source)

    def ordered_add(self, terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None) -> None:
        """Add immediately."""
        add_by_torch(terms, out, order, mean)


class CudaDevice(Device):
    """An NVIDIA GPU, with one stream for the copies in each direction.

    Tests without a GPU run the all-reduce that uses it on a device whose copies lag, and check the calls of ``torch.cuda`` below against the signatures of the installed torch.

    Raises:
        ConfigError: if this process cannot use CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"the model is on {device}, but this process cannot use CUDA: move the model to 'cpu', or install a driver"
                " and a torch with CUDA"
            )
        super().__init__(device)
        self._copying = {stream: torch.cuda.Stream(device) for stream in (DeviceStream.TO_HOST, DeviceStream.TO_DEVICE)}

    def _stream(self, stream: DeviceStream) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream is DeviceStream.COMPUTE else self._copying[stream]

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return zeroed GPU memory; the allocator does not reuse it before both streams have caught up."""
        memory = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        for stream in self._copying.values():
            stream.wait_stream(self._stream(DeviceStream.COMPUTE))  # zeroing comes before every copy
            memory.record_stream(stream)
        return memory

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return page-locked memory of torch's allocator, which knows the copies that use it."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock shared memory. Other memory does not consist of whole pages, and is left alone.

        Raises:
            JobError: if the driver refuses.
        """
        mapping = memory.untyped_storage()
        if _is_mapped(mapping):
            runtime: Any = torch.cuda.cudart()
            with torch.cuda.device(self.device):  # another thread than the script's would initialize the first GPU
                error = int(runtime.cudaHostRegister(mapping.data_ptr(), mapping.nbytes(), 0))
            if error:
                raise JobError(
                    f"CUDA cannot page-lock {mapping.nbytes()} bytes of shared memory (cudaHostRegister: error {error}):"
                    " give this worker more memory, or set shared_bytes=0"
                )

    def unpin(self, memory: torch.Tensor) -> None:
        """Release the page lock."""
        mapping = memory.untyped_storage()
        if _is_mapped(mapping):
            runtime: Any = torch.cuda.cudart()
            with torch.cuda.device(self.device):
                runtime.cudaHostUnregister(mapping.data_ptr())

    def mark(self, stream: DeviceStream) -> DeviceEvent:
        """Record a CUDA event."""
        event = torch.cuda.Event(blocking=True)  # a process that waits for it leaves the core to others
        event.record(self._stream(stream))
        return event

    def hold(self, stream: DeviceStream, event: DeviceEvent, why: Wait) -> None:
        """Let a CUDA stream wait for a CUDA event."""
        self._stream(stream).wait_event(event)

    def wait(self, event: DeviceEvent, why: Wait) -> None:
        """Block until the GPU has reached the event."""
        event.synchronize()

    def copy(self, into: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Queue a copy; torch makes one from or to memory that is not pinned wait for its completion."""
        on = self._stream(stream)
        with torch.cuda.stream(on):
            into.copy_(source, non_blocking=True)
        (into if into.is_cuda else source).record_stream(on)  # freed, its memory is not reused before

    def ordered_add(self, terms: Terms, out: torch.Tensor, order: str, mean: MeanDivisor | None) -> None:
        """Add in one pass over the memory if Triton is installed, otherwise by torch."""
        with torch.cuda.device(self.device):  # kernels of Triton run on the current device
            ordered_add(terms, out, order, mean)


def _is_mapped(memory: torch.UntypedStorage) -> bool:
    return memory.data_ptr() % mmap.PAGESIZE == 0


DEVICES: dict[str, Callable[[torch.device], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
"""The class for each type of device that a model can be on."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the device for a model whose tensors are on ``device``.

    Raises:
        ConfigError: if a model there cannot be trained.
    """
    if device.type not in DEVICES:
        raise ConfigError(f"the model is on {device}, where it cannot be trained: move it to {' or '.join(DEVICES)}")
    return DEVICES[device.type](device)
