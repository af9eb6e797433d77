"""Frameworks that know backends or launchers by name are changed when they are imported; without the frameworks."""

import importlib
import sys

import pytest
import torch

from holdfast.distributed import frameworks

STATE = """
import torch

class PartialState:
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if cpu:
            return "gloo", "MULTI_CPU"
        return backend, "MULTI_GPU" if torch.cuda.is_available() else "NO"
"""
MPI = """
class MPIEnvironment:
    @staticmethod
    def detect():
        return True
"""
MODULES = {"accelerate/state.py": STATE, "lightning/fabric/plugins/environments/mpi.py": MPI}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two packages with the names of the frameworks; what is imported in the test is forgotten after it."""
    for name, text in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        for folder in list(path.relative_to(tmp_path).parents)[:-1]:
            (tmp_path / folder / "__init__.py").touch()  # so that it comes before an installed one
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "lightning")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported():
    state = importlib.import_module("accelerate.state").PartialState()
    return state, importlib.import_module("lightning.fabric.plugins.environments.mpi").MPIEnvironment


@pytest.mark.parametrize("variables", [{"OMPI_MCA_mpi_ft_enable": "1"}, {"HOLDFAST_STORE": "holdfast://127.0.0.1:1/a"}])
@pytest.mark.parametrize("is_late", [False, True])
def test_in_a_job_the_backend_is_accepted_and_mpi_is_left_alone(installed, monkeypatch, variables, is_late):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if is_late:  # the frameworks were imported first
        imported()

    frameworks.adapt_frameworks()
    state, environment = imported()

    assert state._prepare_backend(True, False, "holdfast") == ("holdfast", "MULTI_CPU")
    assert state._prepare_backend(backend="holdfast") == ("holdfast", "MULTI_CPU")
    assert state._prepare_backend(cpu=True, backend="gloo") == ("gloo", "MULTI_CPU")
    assert state._prepare_backend(backend="nccl") == ("nccl", "NO")
    assert not environment.detect()


def test_where_there_is_a_gpu_accelerate_uses_it_unless_told_otherwise(installed, monkeypatch):
    monkeypatch.setenv("HOLDFAST_STORE", "holdfast://127.0.0.1:1/a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    frameworks.adapt_frameworks()
    state, _ = imported()

    assert state._prepare_backend(backend="holdfast") == ("holdfast", "MULTI_GPU")
    assert state._prepare_backend(cpu=True, backend="holdfast") == ("holdfast", "MULTI_CPU")


def test_in_any_other_process_the_frameworks_stay_as_they_are(installed, monkeypatch):
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)

    frameworks.adapt_frameworks()
    state, environment = imported()

    assert state._prepare_backend(True, False, "holdfast") == ("gloo", "MULTI_CPU")
    assert environment.detect()
