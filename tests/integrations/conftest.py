"""Tests of frameworks; ``make integrations`` runs them in an environment that has these."""

import importlib.util
from pathlib import Path

import pytest

from holdfast.session.session import forget_sessions

CORE = (
    # Of each framework: deaths in training with the bits of the undisturbed run, and what its scripts change.
    "test_accelerate.py::test_deaths_in_training_change_no_bit[gloo]",
    "test_accelerate.py::test_only_the_import_changes",
    "test_backend_frameworks.py::test_survivors_finish_with_equal_weights[hf_trainer",
    "test_data_huggingface.py::test_the_state_of_a_shuffle_buffer_is_not_believed",
    "test_data_torchdata.py::test_its_sampler_is_drawn_alike",
    "test_data_webdataset.py::test_workers_of_a_job_read_all_shards",
    "test_lightning.py::test_fabric_survives_and_ends_with_the_bits_of_one_process[gloo]",
    "test_lightning.py::test_nothing_is_unpickled_before_its_digest_is_verified",
    "test_lightning.py::test_one_worker_of_five_survives_kills_in_every_phase_and_nothing_differs[gloo]",
    "test_lightning_docs.py::test_one_line_of_a_lightning_script_changes",
    "test_transformers_failures.py::test_the_changed_lines_of_a_script_are_two",
    "test_transformers_failures.py::test_workers_die_in_a_step_in_an_evaluation_and_while_saving[gloo]",
)
"""Beginnings of the names of the tests that continuous integration runs; ``make integrations`` runs all."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and item.nodeid.rpartition("/")[2].startswith(CORE):
            item.add_marker(pytest.mark.core)


@pytest.fixture(autouse=True)
def framework(request):
    """Skip tests whose module names frameworks in ``NEEDS`` that are not installed here."""
    missing = [name for name in getattr(request.module, "NEEDS", ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: run make integrations")


@pytest.fixture(autouse=True)
def _no_open_session():
    yield
    forget_sessions()
