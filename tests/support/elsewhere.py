"""A device whose numbers the host can only read where it says so: the meta device, with every read noted.

Tensors on torch's meta device have no numbers. So a model there shows without a GPU which code mixes devices, and which
code makes the host wait for the device.
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import holdfast
from holdfast.checkpoint import format
from holdfast.comm import device as devices
from holdfast.comm.device import CpuDevice, DeviceStream
from holdfast.comm.fabrics.base import Fabric

META = torch.device("meta")
PACKAGE = Path(holdfast.__file__).parent
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
"""The operations that may take tensors of two devices."""


class MetaDevice(CpuDevice):
    """Trains models on the meta device: what arrives in host memory are ones."""

    is_host = False
    adds = False

    def allocate(self, size_bytes):
        return torch.zeros(size_bytes, dtype=torch.uint8, device=META)

    def copy(self, into, source, stream):
        to, of = (into, source) if stream is DeviceStream.TO_HOST else (source, into)
        assert to.device.type == "cpu"
        assert of.device.type == "meta"
        assert to.shape == of.shape
        assert to.dtype == of.dtype
        if stream is DeviceStream.TO_HOST:
            to.fill_(1)


class HostReads(TorchDispatchMode):
    """Counts where the package reads numbers of a meta tensor, which are ones; the host would wait for a GPU there.

    Within it, no operation but a copy may take tensors of both devices, unless they have no dimension.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        if not any(value.device == META for value in tensors):
            return func(*args, **kwargs)
        if func not in COPIES:
            assert all(value.device == META or not value.dim() for value in tensors), f"{func} mixes devices"
        if func is aten._local_scalar_dense.default:
            self._note()
            return torch.ones((), dtype=tensors[0].dtype).item()
        if func in (aten._to_copy.default, aten.clone.default) and str(kwargs.get("device")) == "cpu":
            self._note()
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if func is aten.copy_.default and tensors[0].device.type == "cpu":
            self._note()
            return tensors[0].fill_(1)
        if func is aten.equal.default:
            self._note()
            return True
        return func(*args, **kwargs)

    def _note(self):
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        if frame is None:
            self.counts["the script"] += 1
        else:
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            self.counts[f"{file}:{frame.f_code.co_qualname.split('.')[-1]}"] += 1


def take_leaf(leaf, where, taken, take=format._take_leaf):
    """Let a tensor on the meta device be saved, which is refused otherwise, because it has no numbers."""
    if not (isinstance(leaf, torch.Tensor) and leaf.device == META):
        return take(leaf, where, taken)
    path = format.tensor_path(where)
    taken.leaves[path] = leaf
    return {"tensor": path}


@contextlib.contextmanager
def elsewhere():
    """Let models on the meta device be trained."""
    before, take = Fabric.devices, format._take_leaf
    format._take_leaf = take_leaf
    devices.DEVICES["meta"], Fabric.devices = MetaDevice, (*before, "meta")
    devices.device_of.cache_clear()
    try:
        yield
    finally:
        Fabric.devices, format._take_leaf = before, take
        del devices.DEVICES["meta"]
        devices.device_of.cache_clear()
