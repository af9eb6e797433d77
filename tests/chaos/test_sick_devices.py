"""Workers whose device fails: it is lost, out of memory, or computes for ever. No GPU is needed, the exceptions are those of one."""

import pytest
from exact import SCRIPT, check_nothing_lost, reference_hash
from jobs import assert_landed, run_report

pytestmark = pytest.mark.chaos
SLICES = 6


def run(tmp_path, *faults, options=(), fabric="gloo", **expected):
    inject = [word for fault in faults for word in ("--inject", fault)]
    script = (SCRIPT, "mlp", "sgd", "--slices", SLICES, "--compute")
    return run_report(tmp_path, "-n", 3, "--fabric", fabric, *options, *inject, *script, **expected)


def lost(report):
    return {
        (event["rank"], event["step"], event["what"]) for event in report["_events"] if event["event"] == "DeviceLost"
    }


def test_a_lost_device_and_too_little_memory_for_more_slices_end_a_worker_and_not_the_job(tmp_path):
    report = run(
        tmp_path,
        "gpu-error:rank=1,step=2",
        "gpu-oom:rank=0,step=3,phase=backward",  # once: with memory freed, the slice is computed again
        *["gpu-oom:rank=2,step=4,phase=backward"] * 2,  # and twice
    )

    check_nothing_lost(report, reference_hash("mlp", "sgd", (), SLICES), [0])
    assert_landed(report, 1, 2)
    assert lost(report) == {(1, 2, "lost"), (2, 4, "memory")}
    assert [f["kind"] for f in report["failures"]] == ["gpu-error", "gpu-oom"]
    assert report["failures"][0]["why"].startswith("CUDA error: uncorrectable ECC error")


def test_too_little_memory_for_the_slices_of_the_beginning_is_an_error_of_the_script(tmp_path):
    report = run(tmp_path, *["gpu-oom:rank=1,step=2,phase=backward"] * 2, exit_code=1)

    assert report["outcome"] == "failed"
    error = report["error"]
    assert (error["rank"], error["step"], error["exit_code"]) == (1, 2, 1)
    assert error["message"].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert lost(report) == set()


def test_a_computation_that_never_ends_is_found_and_its_worker_is_done_without(tmp_path):
    report = run(tmp_path, "gpu-hang:rank=2,step=3,phase=backward", options=("--hang-timeout", 2))

    check_nothing_lost(report, reference_hash("mlp", "sgd", (), SLICES), [0, 1])
    assert_landed(report, 2)
    assert report["failures"][0]["silent_s"] >= 2


def test_a_device_that_is_lost_in_an_all_reduce_or_in_the_optimizer_changes_no_bit(tmp_path):
    report = run(
        tmp_path, "gpu-error:rank=0,step=2,phase=allreduce", "gpu-error:rank=2,step=5,phase=optimizer", fabric="ulfm"
    )

    check_nothing_lost(report, reference_hash("mlp", "sgd", (), SLICES), [1])
    assert_landed(report, 0, 2)
    assert lost(report) == {(0, 2, "lost"), (2, 5, "lost")}
