"""States on a device: what is saved is copied to the host once, and only by its writer."""

import pytest
import torch
from lagging import LaggingDevice, lagging

from holdfast.checkpoint import CheckpointStore, take
from holdfast.checkpoint.snapshot import SnapshotBuffer
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.comm import device as devices
from holdfast.comm.device import Wait
from holdfast.config import Settings
from holdfast.state import manager as state_manager
from holdfast.state.manager import CheckpointManager

CPU = torch.device("cpu")


def model(seed=1):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{n}": torch.randn(40 + 7 * n, 5, generator=generator) for n in range(5)}
    return {"model": tensors | {"last": tensors["t0"].t()}, "step": torch.tensor(3)}


@pytest.mark.parametrize("parts", [1, 3])
def test_each_writer_copies_its_part_and_no_size_costs_a_copy(parts):
    given = model()
    expected = [take(given, part, parts) for part in range(parts)]

    with lagging() as made:
        assert take(given).size_bytes == sum(content.size_bytes for content in expected)
        for part in range(parts):
            before = made[0].bytes_to_host if made else 0
            copied = SnapshotBuffer().copy(take(given, part, parts))
            assert made[0].bytes_to_host - before == expected[part].size_bytes
            for own, box in zip(copied.boxes, expected[part].boxes, strict=True):
                assert torch.equal(own.tensor, box.tensor)
                assert own.tensor.is_contiguous()


def begin(manager, given, rank):
    manager.begin(1, given, {}, [(0,), (1,), (2,)], (rank,), 0)


@pytest.mark.parametrize("shared_bytes", [0, 1 << 20])
def test_a_manager_copies_nothing_that_it_does_not_write(tmp_path, monkeypatch, shared_bytes):
    monkeypatch.setattr(state_manager, "SHARED_BYTES", shared_bytes)
    monkeypatch.setattr(CheckpointStore, "write", lambda *_: None)
    given = model()
    shares = [take(given, part, 3).size_bytes if not shared_bytes else 0 for part in range(3)]
    if shared_bytes:
        shares[0] = take(given).size_bytes

    for rank in range(3):
        manager = CheckpointManager(Settings(checkpoint_dir=str(tmp_path / str(rank))), background=True)
        with lagging() as made:
            begin(manager, given, rank)
            assert sum(device.bytes_to_host for device in made) == shares[rank]
        manager._writer.close(60)


def saved_late(skips=()):
    """Snapshot a state that is still being computed, and changed right after it; return what was saved of it."""
    device = LaggingDevice(CPU, 1, skips, computes_late=True, longest_s=0.02)
    given = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    devices.DEVICES["cpu"] = lambda _: device
    snapshot = SnapshotBuffer()
    result = []
    for number in range(5):
        for tensor in given.values():
            device.compute(lambda tensor=tensor, number=number: tensor.fill_(number + 1))
        copied = snapshot.copy(take(given))
        result += [box.tensor.clone() for box in copied.boxes]
        assert snapshot._memory.untyped_storage().data_ptr() in device.pinned
    device.settle()
    snapshot.close()
    assert not device.pinned
    return [tensor.tolist() == [1.0 + n // 2] * 1000 for n, tensor in enumerate(result)]


@pytest.mark.parametrize("skip", [None, Wait.COMPUTED, Wait.COPIED])
def test_a_copy_waits_for_what_is_computed_and_the_writer_for_the_copy(skip):
    with lagging():
        right = saved_late({skip} - {None})

    assert all(right) is (skip is None)


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_of_a_device_has_the_bytes_of_host_memory(tmp_path, background):
    given = model()
    for folder in ("host", "device"):
        store = CheckpointStore(str(tmp_path / folder), "safetensors")
        writer = CheckpointWriter(store, background=background)
        with lagging() if folder == "device" else lagging(longest_s=0):
            if folder == "host":
                devices.DEVICES["cpu"] = devices.CpuDevice
                devices.device_of.cache_clear()
            writer.begin(1, take(given), {}, "a")
            writer.commit(0)
            writer.wait()
        writer.close()

    files = [sorted((tmp_path / folder).rglob("*.safetensors")) for folder in ("host", "device")]
    assert files[0]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
