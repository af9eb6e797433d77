"""What must hold on one GPU: the sections of ``benchmarks/gpu.py``, small. The same code runs on the CPU, where it counts for nothing."""

import importlib
import json

import pytest
import torch
from gpus import staged
from gpus.jobs import Job, state_of
from gpus.results import Results, Where

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = (pytest.param("cuda", marks=needs_gpu), "cpu")


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "figures.json", {})


def held(results):
    """Whether everything was measured, and held."""
    return results.figures and not results.failed


@pytest.mark.chaos
@needs_gpu
@pytest.mark.parametrize("kills", staged.KILLS[2], ids=staged.PHASES)
def test_a_kill_in_any_phase_changes_no_bit_on_a_gpu(kills, results):
    where = Where("cuda", tiny=True)
    undisturbed = state_of(Job(where, "cnn", 2).run())

    staged.one(where, results, "cnn", 2, kills, undisturbed)

    assert held(results), results.figures


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("section", ["kernel", "exporter"])
def test_a_section_holds(section, device, results):
    importlib.import_module(f"gpus.{section}").run(Where(device, tiny=True), results)

    assert held(results), results.figures
    assert json.loads(results.path.read_text())["figures"] == results.figures


@pytest.mark.chaos
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("section", ["staged", "sick", "lifecycles"])
def test_a_section_with_kills_holds(section, device, results):
    """A device-side assert, too little memory and a kernel that does not end are in ``sick``."""
    importlib.import_module(f"gpus.{section}").run(Where(device, tiny=True), results)

    assert held(results), results.figures


@needs_gpu
@pytest.mark.parametrize("section", ["waits", "memory"])
def test_a_section_that_reads_counters_of_the_gpu_holds(section, results):
    importlib.import_module(f"gpus.{section}").run(Where("cuda", tiny=True), results)

    assert held(results), results.figures
