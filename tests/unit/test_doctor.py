"""What breaks bits is found, and named; what does not is left in peace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from jobs import ROOT, holdfast
from torch import nn
from train_broken import BREAKS, train

from holdfast import Session, Sharded
from holdfast.cli.doctor import doctor
from holdfast.engine.reinit_context import application
from holdfast.errors import ConfigError
from holdfast.state.gpu_platform import GpuDescription, gpu_properties
from holdfast.tools.doctor.checks import Findings, examine
from holdfast.tools.doctor.findings import ScriptFindings, blame
from holdfast.tools.doctor.layers import usual_subjects
from holdfast.tools.doctor.machine import why_unusable
from holdfast.tools.doctor.report import checks_of, is_exact, lines_of
from holdfast.tools.doctor.script import ScriptInspected, ScriptInspector
from holdfast.tools.doctor.subprocesses import inspect
from holdfast.tools.doctor.target import DoctorTarget, is_misaligned, results_of

NAMES = {name: made.__name__ for name, made in BREAKS.items()}
FACTS = {
    "kind": {"cpu": "any", "capability": "any", "threads": "1", "flags": "", "kernels": ""},
    "cpus": 2, "libraries": {}, "versions": {}, "variables": {}, "gpus": [], "fabrics": {"ulfm": "5", "no ulfm": "", "gloo": True},
    "shm_bytes": 1 << 30, "open_files": 4096,
}  # fmt: skip
SCRIPT = ROOT / "tests" / "support" / "train_broken.py"


@pytest.fixture(autouse=True)
def one_thread():
    """As workers have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def look_at(broken, shared, *, briefly=False):
    """What was seen of the script's first step, in this process."""
    application.looks = look = ScriptInspector(shared, briefly=briefly)
    try:
        with pytest.raises(ScriptInspected):
            train(broken, fabric="virtual", workers=4)
    finally:
        application.looks = None
    return look.seen


def checks(broken, tmp_path):
    """What is said of it; this process stands for the other one, too."""
    seen, other = look_at(broken, tmp_path / "s.pt"), look_at(broken, tmp_path / "s.pt", briefly=True)
    # As it comes from the process that looked:
    return checks_of(json.loads(json.dumps({"seen": seen.as_json(), "machine": FACTS})), {"seen": other.as_json()})


def said(found, name):
    """The checks of a name."""
    return [check for check in found if check.name == name]


def test_a_right_model_is_exact_and_what_it_draws_is_told(tmp_path):
    found = checks("none", tmp_path)

    assert is_exact(found), lines_of(found)
    assert said(found, "randomness")[0].what == "the model draws from torch, NumPy: seeded for each slice"
    assert "5 layers; a slice of 4 samples" in said(found, "model")[0].what


@pytest.mark.parametrize("broken", ["unseeded", "system"])
def test_a_layer_that_draws_outside_of_the_seeded_generators_is_named(broken, tmp_path):
    found = checks(broken, tmp_path)

    assert not is_exact(found)
    (step,) = said(found, "step")
    assert step.what.startswith(f"computed again: different bits in 1.1 ({NAMES[broken]}) (output")
    assert "Holdfast seeds for each slice" in step.advice


def test_a_layer_that_depends_on_the_number_of_threads_is_named_and_holdfast_holds_it(tmp_path):
    found = checks("threads", tmp_path)

    (threads,) = said(found, "threads")
    assert threads.verdict == "held"
    assert "1.1 (Threads)" in threads.what.partition(": ")[2].split(", ")
    assert is_exact(found)


def test_samples_that_differ_when_they_are_fetched_again_are_told_from_the_model(tmp_path):
    found = checks("samples", tmp_path)

    assert [check.name for check in found if check.verdict == "changes bits"] == ["samples"]


def test_samples_at_an_odd_place_in_memory_matter_where_a_layer_computes_otherwise_from_there():
    layer = Findings("0 (Linear)", memory=["output"])
    facts = {"machine": FACTS}
    wrong = ScriptFindings(layers=[layer], misaligned=["the samples"]).as_json()

    found = checks_of(facts | {"seen": wrong}, {"seen": ScriptFindings().as_json()})

    (check,) = said(found, "alignment")
    assert check.verdict == "changes bits"
    assert check.what.endswith("; the samples are misaligned")
    right = ScriptFindings(layers=[layer]).as_json()
    assert said(checks_of(facts | {"seen": right}, {"seen": right}), "alignment")[0].verdict == "held"


def test_weights_and_samples_that_are_others_in_another_process_are_told():
    here, there = (
        ScriptFindings(weights="1", samples_digest="2").as_json(),
        ScriptFindings(weights="3", samples_digest="4").as_json(),
    )

    found = checks_of({"machine": FACTS, "seen": here}, {"seen": there})

    assert [check.name for check in found if check.verdict == "changes bits"] == ["weights", "samples"]
    assert is_exact(checks_of({"machine": FACTS, "seen": here}, {"seen": here}))


def test_a_tensor_of_torch_is_at_no_odd_place_and_a_part_of_one_is():
    whole = torch.zeros(9)

    assert not is_misaligned(whole)
    assert is_misaligned(whole[1:])


def test_what_is_in_no_layer_is_in_the_loop(tmp_path):
    (step,) = said(checks("loss", tmp_path), "step")

    assert "but in no single layer" in step.what


@pytest.mark.timeout(300)
def test_doctor_names_a_layer_that_depends_on_the_order_of_a_set_and_trains_nothing():  # or the script would say so
    done = holdfast("doctor", "--json", SCRIPT, "sets")

    assert done.returncode == 1, done.stderr
    broken = [check for check in json.loads(done.stdout)["checks"] if check["verdict"] == "changes bits"]
    assert [(check["name"], check["what"]) for check in broken] == [
        ("elsewhere", "the step has different bits in another process: 1.1 (Sets)")
    ]
    assert "PYTHONHASHSEED" in broken[0]["advice"]


@pytest.mark.soak  # two processes more
def test_doctor_says_why_a_script_cannot_be_looked_at(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('no session')")

    done = holdfast("doctor", script)

    assert done.returncode == 1
    assert "script.py ended without training: it never ran session.steps(...)" in done.stderr


def test_a_script_that_is_not_there_and_a_model_that_is_split_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no script 'no\.py'"):
        inspect(Path("no.py"), (), workers=4, timeout_s=60)
    split = Session(Sharded(nn.Linear(2, 2)), lambda p: torch.optim.SGD(p, lr=0.1), workers=2)
    with pytest.raises(ConfigError, match="this one is split"):
        next(ScriptInspector(tmp_path / "s.pt")(split._trainable, None, None, None))


# -- layers by themselves


def test_the_usual_layers_can_be_placed_on_another_device():
    """``meta`` has shapes and no values; mixing it with the CPU raises, as it would on a GPU."""
    refused_by_meta = {"CTC", "SGD (fused)", "Adam (fused)"}  # it has no kernels for these
    for subject in usual_subjects("meta"):
        if subject.name not in refused_by_meta:
            assert {value.device.type for value in results_of(subject).values()} == {"meta"}, subject.name


def test_a_layer_that_makes_a_tensor_on_the_cpu_cannot_be_placed_elsewhere():
    """The negative control."""
    subject = DoctorTarget(name="odd", compute=lambda x: x + torch.ones(5), args=(torch.ones(5),))

    with pytest.raises(RuntimeError, match="device"):
        results_of(subject.on(torch.device("meta")))


def test_a_device_that_is_not_there_is_refused_with_what_torch_says():
    assert why_unusable("cpu") == ""
    assert why_unusable("meta") == "Cannot copy out of meta tensor; no data!"
    assert why_unusable("gpu").startswith("Expected one of cpu, cuda, ")
    with pytest.raises(ConfigError, match=r"--device cuda is for common layers: a script's model is on the device"):
        doctor(SCRIPT, device="cuda")


def test_what_the_settings_promise_on_a_gpu_is_a_line():
    gpu = GpuDescription(name="NVIDIA H100", multiprocessors=132, deterministic=True, workspace=":4096:8")
    for description, verdict, what in (
        (gpu, "ok", "reproducible"),
        (dataclasses.replace(gpu, benchmark=True), "missing", "in place, not reproducible"),
    ):
        facts = FACTS | {"kind": FACTS["kind"] | gpu_properties(description)}
        lines = {check.name: check for check in checks_of({"layers": [], "machine": facts}, {"layers": []})}
        assert (lines["promise"].verdict, lines["promise"].what) == (verdict, what)
    assert "cudnn.benchmark" in lines["promise"].advice
    assert "promise" not in {check.name for check in checks_of({"layers": [], "machine": FACTS}, {"layers": []})}


def test_samples_beside_others_are_compared_row_by_row():
    together = {
        s.name: examine(s, ()).together for s in usual_subjects() if s.name in ("batch norm", "layer norm", "sum")
    }

    assert together["batch norm"][:1] == ["output"]  # its statistics are those of the batch
    assert together["layer norm"] == []
    assert together["sum"] is None


def test_a_kernel_that_takes_another_path_from_an_odd_place_is_found():
    subject = DoctorTarget(name="odd", compute=lambda x: x + float(x.data_ptr() % 64 > 0), args=(torch.ones(5),))

    found = examine(subject, ())

    assert found.memory == ["output"]
    assert found.again == []


def test_gradients_are_compared_too_and_buffers_are_put_back():
    class Backward(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            Backward.calls += 1
            return gradient * Backward.calls

    norm = nn.BatchNorm1d(3)
    odd = DoctorTarget(name="odd", compute=Backward.apply, args=(torch.ones(4, 3),))

    assert examine(odd, ()).again == ["gradient of input 0"]
    assert examine(DoctorTarget.of("norm", norm, torch.randn(4, 3)), ()).again == []
    assert norm.num_batches_tracked == 0


def test_the_first_layer_that_was_given_the_same_and_made_something_else_of_it_is_to_blame():
    one = [Findings("b", {"input 0": "2", "output": "3"}), Findings("a", {"input 0": "1", "output": "2"})]
    other = [Findings("b", {"input 0": "9", "output": "8"}), Findings("a", {"input 0": "1", "output": "9"})]

    assert blame(one, other) == "a"
    assert blame(one, one) == ""
