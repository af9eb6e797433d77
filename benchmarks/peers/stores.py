"""Ways to store a training state, behind one interface, for ``benchmarks/checkpoint/save_load.py``.

A state is a flat dict of tensors. Every store saves durably: it returns when the files are synced. Libraries are
imported on use, so that this module can also be imported in the environment of the peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
Wait = Callable[[], None]


class Store:
    """One way to store a state."""

    def save(self, folder: Path, state: State) -> None:
        """Write the state; it is durable when this returns."""
        raise NotImplementedError

    def load(self, folder: Path, model: State) -> None:
        """Load the saved state into the memory of ``model``."""
        raise NotImplementedError

    def begin(self, folder: Path, state: State) -> Wait:
        """Write the state asynchronously; it may change once this returns.

        Returns:
            A function that waits until the state is durable.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything that this store has started."""


class Holdfast(Store):
    """Holdfast: digests of every byte, a two-phase commit, and a writer thread."""

    def __init__(self, format: str = "safetensors") -> None:
        self._format = format
        self._writer: Any = None

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        self._checkpoints(folder).write_tensors(1, state, {}).commit(0)

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`; every byte is verified."""
        loaded = self._checkpoints(folder).load(1, into=model).state
        copy_foreign(loaded, model)

    def begin(self, folder: Path, state: State) -> Wait:
        """See :meth:`Store.begin`."""
        from holdfast.checkpoint.write_plan import take
        from holdfast.checkpoint.writer import CheckpointWriter

        # One writer for all rounds, as in a run, so that its memory is reused.
        if self._writer is None:
            self._writer = CheckpointWriter(self._checkpoints(folder), background=True)
        self._writer._checkpoints = self._checkpoints(folder)
        writer = self._writer
        writer.begin(1, take(state), {})

        def wait() -> None:
            writer.commit(0)
            writer.wait()
            for outcome in writer.poll():
                if outcome.error is not None:
                    raise outcome.error

        return wait

    def _checkpoints(self, folder: Path) -> Any:
        from holdfast.checkpoint import CheckpointStore

        return CheckpointStore(folder, self._format)


class TorchSave(Store):
    """``torch.save``, and ``torch.load`` with ``weights_only``.

    Args:
        mapped: Map the file into memory when loading.
    """

    def __init__(self, mapped: bool = False) -> None:
        self._mapped = mapped

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        folder.mkdir(parents=True)
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
        sync(folder / "state.pt", folder)

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`."""
        copy_foreign(torch.load(folder / "state.pt", weights_only=True, mmap=self._mapped), model)


class Safetensors(Store):
    """``safetensors.torch``, the whole state in one file."""

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        save_file(state, folder / "state.safetensors")
        sync(folder / "state.safetensors", folder)

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`."""
        from safetensors.torch import load_file

        copy_foreign(load_file(folder / "state.safetensors"), model)


class Dcp(Store):
    """``torch.distributed.checkpoint`` on one worker, which syncs its files itself.

    Args:
        process: Write asynchronously in a separate process instead of a thread.
    """

    def __init__(self, process: bool = False) -> None:
        self._process = process
        self._stager: Any = None

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        from torch.distributed import checkpoint as dcp

        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=os.cpu_count() or 1), no_dist=True)
        sync(folder)

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`; it reads into the given memory."""
        from torch.distributed import checkpoint as dcp

        wanted = dict(model)
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        copy_foreign(wanted, model)

    def begin(self, folder: Path, state: State) -> Wait:
        """See :meth:`Store.begin`; the memory of the copy is reused, as in Holdfast."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        join_alone()
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, self._process, False, False))
        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        writer = dcp.FileSystemWriter(folder, thread_count=os.cpu_count() or 1)
        speak = hush() if self._process else lambda: None
        response = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind, async_stager=self._stager)

        def wait() -> None:
            (response if isinstance(response, Future) else response.upload_completion).result()
            sync(folder)
            speak()

        return wait

    def close(self) -> None:
        """See :meth:`Store.close`."""
        if self._stager is not None:
            self._stager.close()


class Orbax(Store):
    """Orbax on one worker: JAX arrays on the CPU, which cannot be written in place, so loading creates new ones."""

    def __init__(self) -> None:
        import jax
        import orbax.checkpoint as ocp

        jax.config.update("jax_enable_x64", True)
        self._ocp, self._jax = ocp, jax
        self._arrays: dict[str, Any] = {}
        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        self.begin(folder, state)()

    def begin(self, folder: Path, state: State) -> Wait:
        """See :meth:`Store.begin`."""
        self._checkpointer.save(folder / "state", self.arrays(state))

        def wait() -> None:
            self._checkpointer.wait_until_finished()
            sync_all(folder)

        return wait

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`; ``model`` receives the new arrays, which torch uses without a copy."""
        arrays = self.arrays(model)
        wanted = self._jax.tree.map(self._ocp.utils.to_shape_dtype_struct, arrays)
        restored = self._checkpointer.restore(folder / "state", wanted)
        self._jax.block_until_ready(restored)
        model.update({key: torch.utils.dlpack.from_dlpack(array) for key, array in restored.items()})

    def arrays(self, state: State) -> dict[str, Any]:
        """Return the state as JAX arrays; created once, outside of every measurement."""
        if self._arrays.keys() != state.keys():
            self._arrays = {key: self._jax.numpy.asarray(value.numpy().copy()) for key, value in state.items()}
            self._jax.block_until_ready(self._arrays)
        return self._arrays

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self._checkpointer.close()


class TorchCheckpointing(Store):
    """The package ``torch_checkpointing`` on one worker; its manager reads and writes ``{"state": tensors}``."""

    def __init__(self) -> None:
        self._managers: dict[bool, Any] = {}

    def save(self, folder: Path, state: State) -> None:
        """See :meth:`Store.save`."""
        self._manager(background=False).save(str(folder / "state"), {"state": dict(state)})
        sync_all(folder)

    def begin(self, folder: Path, state: State) -> Wait:
        """See :meth:`Store.begin`; by a process, from memory that it shares."""
        manager = self._manager(background=True)
        written = manager.save(str(folder / "state"), {"state": dict(state)})
        with manager.lock():  # waits until the state is copied
            pass

        def wait() -> None:
            written.result()
            sync_all(folder)

        return wait

    def load(self, folder: Path, model: State) -> None:
        """See :meth:`Store.load`; it copies into the given memory."""
        loaded = self._manager(background=False).load(str(folder / "state"), into={"state": dict(model)})
        copy_foreign(loaded["state"], model)

    def close(self) -> None:
        """See :meth:`Store.close`."""
        for manager in self._managers.values():
            manager.close()

    def _manager(self, *, background: bool) -> Any:
        if background not in self._managers:
            from torch_checkpointing import CheckpointManager
            from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
            from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

            writer = CheckpointWriterConfig(file_write_max_threads=os.cpu_count() or 1)
            make = AsyncCheckpointSaverConfig if background else SyncCheckpointSaverConfig
            save = make(writer_config=writer)
            storage = LocalFileSystemStorageConfig(use_direct_io=False)  # unaligned writes of 0.1.1 fail on ext4
            self._managers[background] = CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))
        return self._managers[background]


STORES: dict[str, Callable[[], Store]] = {
    "holdfast": Holdfast,
    "safetensors": Safetensors,
    "torch": TorchSave,
    "torch, mapped": lambda: TorchSave(mapped=True),
    "dcp": Dcp,
    "dcp, process": lambda: Dcp(process=True),
    "orbax": Orbax,
    "torch-checkpointing": TorchCheckpointing,
}

PEERS = {"orbax": "orbax.checkpoint", "torch-checkpointing": "torch_checkpointing"}
"""Stores of the environment of the peers, and what they import."""


def open_store(name: str) -> Store:
    """Return a store by its name; ``holdfast:`` may be followed by a format."""
    kind, _, format = name.partition(":")
    return Holdfast(format) if format else STORES[kind]()


def copy_foreign(found: State, model: State) -> None:
    """Copy tensors that are not in the model's memory already."""
    for key, tensor in model.items():
        if found[key].data_ptr() != tensor.data_ptr():
            tensor.copy_(found[key])


def sync(*paths: Path) -> None:
    """Wait until files and directories are on the disk."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def sync_all(folder: Path) -> None:
    """Wait until a folder with everything in it is on the disk."""
    sync(*(path for path in folder.rglob("*")), folder)


def hush() -> Wait:
    """Silence standard error, to which DCP's process writes notes, until the returned function is called."""
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)

    def speak() -> None:
        os.dup2(own, 2)
        os.close(own)

    return speak


def join_alone() -> None:
    """Create a process group of one worker, which ``async_save`` requires."""
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def make_state(size_bytes: float, layers: int = 21, seed: int = 0) -> State:
    """Return a transformer's weights with Adam's two moments and its step counts: tensors from 4 bytes upwards.

    The largest, the embedding, is a fifteenth of the whole: 64 MB of 1 GB. Values are random bits.
    """
    width = max(8, round((size_bytes / 12 / (62.5 + 12 * layers)) ** 0.5 / 8) * 8)
    shapes = {"embedding.weight": (round(62.5 * width), width), "norm.weight": (width,), "norm.bias": (width,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.{name}": shape
            for name, shape in {
                "attention.in.weight": (3 * width, width),
                "attention.in.bias": (3 * width,),
                "attention.out.weight": (width, width),
                "attention.out.bias": (width,),
                "mlp.0.weight": (4 * width, width),
                "mlp.0.bias": (4 * width,),
                "mlp.2.weight": (width, 4 * width),
                "mlp.2.bias": (width,),
                "norm1.weight": (width,),
                "norm1.bias": (width,),
                "norm2.weight": (width,),
                "norm2.bias": (width,),
            }.items()
        }
    random = torch.Generator().manual_seed(seed)
    state = {f"model.{name}": torch.rand(shape, generator=random) for name, shape in shapes.items()}
    for i, shape in enumerate(shapes.values()):
        state[f"optimizer.state.{i}.step"] = torch.rand((), generator=random)
        state[f"optimizer.state.{i}.exp_avg"] = torch.rand(shape, generator=random)
        state[f"optimizer.state.{i}.exp_avg_sq"] = torch.rand(shape, generator=random)
    return state
