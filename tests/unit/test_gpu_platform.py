"""What decides bits on a GPU: described, compared, and which promise holds. Every GPU here is made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from some_records import some
from train_kinds import train

from holdfast.config import Settings
from holdfast.data import seeds
from holdfast.records.types import RunStarted
from holdfast.state import gpu_check, platform_check
from holdfast.state.context import LiveSettings, PlatformState
from holdfast.state.gpu_check import describe_gpu, driver_of
from holdfast.state.gpu_platform import GpuDescription, gpu_properties, line_of, promise_of
from holdfast.state.platform import FIELDS, between, number_of
from holdfast.summary.build import build_report

EXACT = GpuDescription(
    name="NVIDIA H100 80GB HBM3", multiprocessors=132, driver="580.65.06", cuda="13.0", cudnn="91002", cublas="13.0.2",
    nccl="2.28.9", deterministic=True, tf32_matmul="none", tf32_cudnn="conv tf32 rnn tf32", reduced=("bf16",),
    attention=("flash", "math"), workspace=":4096:8",
)  # fmt: skip
CPU = platform_check.platform_of_worker()


# -- the properties


def test_everything_that_decides_bits_is_in_the_text():
    assert gpu_properties(EXACT) == {
        "gpu": "NVIDIA H100 80GB HBM3, 132 multiprocessors",
        "gpu_driver": "580.65.06",
        "gpu_libraries": "CUDA 13.0, cuDNN 91002, cuBLAS 13.0.2, NCCL 2.28.9",
        "gpu_flags": "deterministic on; cudnn.benchmark off; cudnn.deterministic off; tf32 matmul none, cuDNN conv tf32 rnn "
        "tf32; reduced-precision sums bf16; attention flash+math; CUBLAS_WORKSPACE_CONFIG :4096:8",
        "promise": "reproducible",
    }


CHANGES = {
    "gpu": {"name": "NVIDIA H200", "multiprocessors": 66},  # half of a card
    "gpu_driver": {"driver": "570.1"},
    "gpu_libraries": {"cuda": "12.8", "cudnn": "90000", "cublas": "", "nccl": "2.31.2"},
    "gpu_flags": {
        "benchmark": True, "deterministic": False, "warn_only": True, "cudnn_deterministic": True, "tf32_matmul": "tf32",
        "tf32_cudnn": "conv none rnn none", "reduced": (), "attention": ("math",), "workspace": ":16:8",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"), [({key: value}, name) for name, its in CHANGES.items() for key, value in its.items()], ids=str
)
def test_each_difference_between_two_gpus_is_found_and_named(change, name):
    mine, theirs = CPU | gpu_properties(replace(EXACT, **change)), CPU | gpu_properties(EXACT)

    found = between(mine, theirs, worker="worker 1 has", others="the others")

    assert number_of(mine) != number_of(theirs)
    assert found.what == f"worker 1 has {FIELDS[name].words} {mine[name] or 'none'}, the others {theirs[name]}"
    assert found.advice == FIELDS[name].advice


def test_a_worker_without_a_gpu_beside_workers_with_one_is_found():
    found = between(CPU, CPU | gpu_properties(EXACT), worker="worker 1 has", others="the others")

    assert found.what == "worker 1 has GPU none, the others NVIDIA H100 80GB HBM3, 132 multiprocessors"


def test_the_platform_of_a_run_on_a_cpu_is_what_it_was():
    """Its digest, and the platform in existing checkpoints, must not change."""
    assert platform_check.platform_of_worker(torch.device("cpu")) == platform_check.platform_of_worker()
    assert list(CPU) == ["capability", "cpu", "gpu", "torch", "numpy", "python", "threads", "flags", "kernels"]


# -- the promise


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"deterministic": False}, "torch.use_deterministic_algorithms(True) is not called"),
        ({"warn_only": True}, "warn_only=True"),
        ({"benchmark": True}, "kernels are chosen by their speed"),
        ({"workspace": ""}, "CUBLAS_WORKSPACE_CONFIG is not set, and must be :4096:8 or :16:8"),
        ({"workspace": ":8:8"}, "CUBLAS_WORKSPACE_CONFIG is :8:8, and must be"),
    ],
    ids=str,
)
def test_what_keeps_runs_from_having_the_same_bits_is_said(change, why):
    promise = promise_of(replace(EXACT, **change))

    assert promise.startswith("in place: ")
    assert why in promise
    assert line_of(promise).startswith("on GPUs, this run is exact in place, and not reproducible: ")
    assert line_of(promise).endswith(promise.removeprefix("in place: "))


def test_all_reasons_are_said_together_and_without_one_a_run_is_reproducible():
    assert promise_of(EXACT) == promise_of(replace(EXACT, workspace=":16:8")) == "reproducible"
    assert line_of("reproducible").startswith("on GPUs, this run is reproducible: ")
    assert promise_of(GpuDescription(name="x", multiprocessors=1)).count("; ") == 1  # two reasons


def job(properties, strategy="rollback"):
    settings = Settings(strategy=strategy)
    platform = PlatformState(properties)
    return SimpleNamespace(settings=settings, live=LiveSettings.of(settings), platform=platform)


def test_the_line_at_the_start_is_for_gpus_and_for_settings_that_promise_bits():
    with_gpu = CPU | gpu_properties(EXACT)

    assert platform_check.promise_line(job(with_gpu)).startswith("on GPUs, this run is reproducible")
    assert platform_check.promise_line(job(CPU)) == ""
    assert platform_check.promise_line(job(with_gpu, "forward")) == ""


def test_a_session_says_once_at_the_start_which_promise_holds(monkeypatch, capsys):
    kind = CPU | gpu_properties(replace(EXACT, deterministic=False))
    monkeypatch.setattr("holdfast.session.session.platform_of_worker", lambda device: kind)

    train(workers=2, fabric="virtual")

    said = [line for line in capsys.readouterr().err.splitlines() if "GPU" in line]
    assert said == [f"holdfast: {line_of(kind['promise'])}"]


def test_the_report_has_the_promise_where_gpus_were_used():
    def of(*kinds):
        records = [some(RunStarted, rank=rank, platform=kind) for rank, kind in enumerate(kinds)]
        return build_report(records, started=(0, 1), wall_s=1.0, seed=0)["platforms"]

    exact, other = CPU | gpu_properties(EXACT), CPU | gpu_properties(replace(EXACT, benchmark=True))

    assert of(exact, exact)["promise"] == "reproducible"
    assert of(exact, other)["promise"].startswith("in place: torch.backends.cudnn.benchmark is True")
    assert "promise" not in of(CPU, CPU)


# -- finding it


def test_a_gpu_is_described_under_the_settings_of_torch(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  gcc 11.4.0\n"
    )
    monkeypatch.setattr(gpu_check, "_DRIVER", tmp_path / "version")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(False)
        before = describe_gpu(torch.device("cuda"))
        torch.use_deterministic_algorithms(True)
        after = describe_gpu(torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(was)

    assert (before.name, before.multiprocessors, before.driver) == ("NVIDIA H100", 132, "580.65.06")
    assert (before.benchmark, before.workspace, before.deterministic) == (True, ":4096:8", False)
    assert set(before.attention) <= {"flash", "efficient", "math", "cuDNN"}
    assert after == replace(before, deterministic=True)


def test_a_text_without_a_driver_has_no_version():
    assert driver_of("") == driver_of("GCC version:  gcc version 11.4.0") == ""


# -- random numbers


def test_generators_of_gpus_are_saved_and_put_back_if_they_are_used(monkeypatch):
    states = [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.extend)

    saved = seeds.generator_states()
    seeds.set_generator_states(saved)

    assert saved["cuda"] == [bytes(range(16)).hex(), bytes(range(16, 32)).hex()]
    assert [state.tolist() for state in put_back] == [list(range(16))]  # of the one GPU that there is now


def test_without_a_gpu_nothing_is_added_and_a_checkpoint_from_one_can_be_read():
    saved = seeds.generator_states()
    assert set(saved) == {"torch", "numpy", "python"}

    seeds.set_generator_states(saved | {"cuda": ["00ff"]})

    assert seeds.generator_states() == saved
