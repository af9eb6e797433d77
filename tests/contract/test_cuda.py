"""The calls of CUDA: that they exist, and, where there is a GPU, what they do."""

import contextlib
import inspect
from unittest import mock

import pytest
import torch
from jobs import ROOT, assert_landed, run_report

from holdfast.comm import MeanDivisor, VirtualCommunicator
from holdfast.comm import device as devices
from holdfast.comm.allreduce import ordered_add
from holdfast.comm.device import CudaDevice, DeviceStream, Wait
from holdfast.comm.memory import SharedSegment
from holdfast.testing.contract import check_ordered_sum

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = torch.device("cuda", 0)


def maker(kind):
    """Return what makes objects of a class of torch, whose arguments and methods are those of the installed one."""
    takes = inspect.signature(kind.__new__)

    def make(*args, **options):
        takes.bind(kind, *args, **options)
        return mock.create_autospec(kind, instance=True)

    return make


@pytest.fixture
def fake_cuda(monkeypatch):
    """``torch.cuda`` without a GPU: every function takes what the installed torch says that it takes, and does nothing."""
    runtime = mock.Mock(spec=["cudaHostRegister", "cudaHostUnregister"])
    runtime.cudaHostRegister.return_value = 0
    stream, event, on_gpu = maker(torch.cuda.Stream), maker(torch.cuda.Event), torch.cuda.device
    fakes = {
        "is_available": lambda: True,
        "cudart": lambda: runtime,
        "Stream": stream,
        "Event": event,
        "current_stream": mock.create_autospec(torch.cuda.current_stream, return_value=stream(GPU)),
        "stream": mock.create_autospec(torch.cuda.stream, side_effect=lambda _: contextlib.nullcontext()),
        "device": mock.Mock(side_effect=lambda device: contextlib.nullcontext(inspect.signature(on_gpu).bind(device))),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(devices.torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    monkeypatch.setattr(devices.torch, "zeros", lambda *args, device, **more: zeros(*args, **more))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return runtime


def test_every_call_of_torch_cuda_has_the_arguments_that_it_takes(fake_cuda):
    device = CudaDevice(GPU)
    memory, segment = device.allocate(64), SharedSegment(8192)

    device.pin(segment.bytes)
    device.pin(torch.zeros(64, dtype=torch.uint8, device="cpu")[1:])
    device.hold(DeviceStream.TO_HOST, device.mark(DeviceStream.COMPUTE), Wait.COMPUTED)
    device.copy(segment.bytes[:64], memory, DeviceStream.TO_HOST)
    device.copy(device.host_memory(64), memory, DeviceStream.TO_HOST)
    device.wait(device.mark(DeviceStream.TO_HOST), Wait.COPIED)
    device.unpin(segment.bytes)

    address = segment.bytes.data_ptr()
    assert torch.cuda.device.mock_calls == [mock.call(GPU)] * 2, "page locks are made on the GPU of the tensors"
    assert fake_cuda.cudaHostRegister.mock_calls == [mock.call(address, 8192, 0)], "other memory is not whole pages"
    assert fake_cuda.cudaHostUnregister.mock_calls == [mock.call(address)]


def test_a_gpu_adds_in_the_order_of_the_job(fake_cuda, monkeypatch):
    monkeypatch.setattr(ordered_add, "HAS_TRITON", False)
    terms = [(n, torch.full((3,), float(n), device="cpu")) for n in range(4)]
    out = torch.empty(3, device="cpu")

    CudaDevice(GPU).ordered_add(terms, out, "tree", MeanDivisor(4.0, 2))

    assert out.tolist() == [1.5, 1.5, 6.0]


def test_a_driver_that_refuses_memory_is_named(fake_cuda):
    fake_cuda.cudaHostRegister.return_value = 2

    with pytest.raises(devices.JobError, match=r"CUDA cannot page-lock 8192 bytes .*cudaHostRegister: error 2"):
        CudaDevice(GPU).pin(SharedSegment(8192).bytes)


def test_a_call_that_torch_does_not_have_is_noticed(fake_cuda):
    with pytest.raises(TypeError):
        torch.cuda.Event(blocks=True)
    with pytest.raises(AttributeError):
        torch.cuda.Stream(GPU).wait_for(torch.cuda.Event())


@needs_gpu
@pytest.mark.parametrize("adds", [True, False], ids=["on-the-gpu", "through-the-host"])
def test_the_contract_of_the_sum_holds_on_a_gpu(adds, monkeypatch):
    monkeypatch.setattr(CudaDevice, "adds", adds)

    check_ordered_sum(VirtualCommunicator(3), CudaDevice(GPU))


@needs_gpu
@pytest.mark.chaos
@pytest.mark.parametrize("words", [(), ("--prepared",)], ids=["session", "prepared"])
def test_two_workers_on_one_gpu_survive_a_kill(tmp_path, words):
    script = ROOT / "tests" / "support" / "train_cuda.py"
    job = ("--fabric", "gloo", "-n", 2)
    alone = run_report(tmp_path / "alone", *job, script, *words)
    killed = run_report(tmp_path / "killed", *job, "--inject", "kill:rank=1,step=2", script, *words)

    assert_landed(killed, 1)
    assert killed["replicas"]["state_sha256"] == alone["replicas"]["state_sha256"]
    assert killed["samples"] == alone["samples"]


@needs_gpu
@pytest.mark.chaos
def test_two_ranks_of_ddp_on_one_gpu_survive_a_kill(tmp_path):
    script = ROOT / "tests" / "support" / "train_ddp_cuda.py"

    report = run_report(tmp_path, "--fabric", "gloo", "-n", 3, "--inject", "kill:rank=1,step=2", script, tmp_path)

    assert_landed(report, 1)
    ended = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 2)]
    assert torch.equal(ended[0], ended[1])
