"""Which exceptions end a worker, and not the job."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from holdfast.launch.supervise.script_failure import device_loss
from holdfast.records.types import DeviceLost
from holdfast.state.context import SliceLoad

MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


@pytest.fixture
def took_over(monkeypatch):
    """Return a function that says whether the session of this process has taken over slices."""

    def say(answer):
        monkeypatch.setitem(sys.modules, "holdfast.session.session", SimpleNamespace(has_taken_over=lambda: answer))

    return say


def test_a_lost_device_ends_the_worker_and_its_gpu_is_named(took_over, monkeypatch):
    took_over(False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    error = torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")

    assert device_loss(error) == DeviceLost(what="lost", message="CUDA error: device-side assert triggered", gpu="3")


def test_too_little_memory_ends_a_worker_that_took_over_slices_and_no_other(took_over, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    took_over(True)
    assert device_loss(MEMORY) == DeviceLost(what="memory", message="CUDA out of memory. Tried to allocate 2.00 GiB.")

    took_over(False)
    assert device_loss(MEMORY) is None

    monkeypatch.delitem(sys.modules, "holdfast.session.session")  # a script without a session
    assert device_loss(MEMORY) is None


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("x"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_error_of_the_script_ends_the_job(took_over, error):
    took_over(True)

    assert device_loss(error) is None


def test_a_worker_has_taken_over_slices_if_it_once_had_fewer():
    load = SliceLoad()
    assert not load.has_grown

    for slices, grown in [(3, False), (2, False), (3, True), (2, False), (0, False), (1, True)]:
        load.note(slices)
        assert load.has_grown is grown
