"""The command line that says a job again, and what is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.launch import job as jobs
from holdfast.launch.job import Job, check, command_line, find_mpirun, resume_command
from holdfast.settings import Settings


def job(script="train.py", **fields):
    options = {key: fields.pop(key) for key in tuple(fields) if key in Job.__dataclass_fields__}
    return Job(script=Path(script), settings=Settings(**{"fabric": "ulfm", "workers": 4} | fields), **options)


def test_a_command_line_holds_what_is_not_the_default():
    given = job(args=("--epochs", "3"), strategy="forward", seed=7, max_restarts=1, report_dir=Path("out dir"))

    line = command_line(given, faults=["kill:rank=1,step=20"])

    assert line == (
        "holdfast run -n 4 --strategy forward --seed 7 --max-restarts 1 --report 'out dir' "
        "--inject kill:rank=1,step=20 train.py --epochs 3"
    )


def test_a_command_line_says_how_checkpoints_are_taken():
    given = job(checkpoint_dir="s3://b/run", checkpoint_auto=True, keep_last=3, keep_every=100, grace_s=5.0)

    assert command_line(given) == (
        "holdfast run -n 4 --checkpoint-dir s3://b/run --keep-last 3 --keep-every 100 --checkpoint-every auto --grace 5 "
        "train.py"
    )


def test_a_job_is_resumed_on_the_survivors_with_the_slices_that_it_had():
    assert resume_command(job(mtbf_s=3.0), 3, "ckpt") == (
        "holdfast run -n 3 --slices 4 --checkpoint-dir ckpt --resume train.py"
    )


def test_a_job_is_resumed_on_as_many_as_it_needs():
    assert resume_command(job(min_workers=3), 2, "ckpt") == (
        "holdfast run -n 3 --min-workers 3 --slices 4 --checkpoint-dir ckpt --resume train.py"
    )


def test_a_job_that_can_start_passes(tmp_path):
    (tmp_path / "train.py").touch()

    check(job(tmp_path / "train.py", report_dir=tmp_path / "new" / "out", log_dir=tmp_path / "logs", fabric="virtual"))


@pytest.mark.parametrize("missing", ["mpirun", "mpi4py"])
def test_missing_mpi_is_refused_with_what_to_install(monkeypatch, tmp_path, missing):
    if missing == "mpirun":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        find_mpirun()

    assert str(caught.value) == (
        f"MPI is not installed (no {missing}): pip install 'holdfast[mpi]', or run with --fabric virtual"
    )
