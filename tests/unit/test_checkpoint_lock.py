"""Two jobs that write checkpoints to one directory replace each other's: the second one is refused."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

import pytest

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.launch.checkpoint_lock import checkpoints_locked
from holdfast.launch.job import Job


def job(place, node_rank=0):
    settings = Settings(fabric="gloo", workers=1, checkpoint_dir=str(place))
    return Job(script=Path("train.py"), settings=settings, nnodes=2, node_rank=node_rank)


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "runs" / "c"

    with checkpoints_locked(job(folder)):
        with pytest.raises(ConfigError, match=f"^--checkpoint-dir file://{folder} is in use by another job; wait"):
            checkpoints_locked(job(f"file://{folder}")).__enter__()
        with checkpoints_locked(job(folder, node_rank=1)):  # the same job on another node
            pass
        with checkpoints_locked(job(tmp_path / "runs" / "d")):
            pass
    assert not folder.exists(), "nothing was saved"
    with checkpoints_locked(job(folder)):
        (folder / "step-00000001").mkdir()
    assert folder.exists()


@pytest.mark.parametrize("place", ["", "s3://bucket/run", "/proc/nothing/c", __file__])
def test_what_has_no_directory_has_no_lock(place):
    with checkpoints_locked(job(place)), checkpoints_locked(job(place)):
        pass


def test_on_a_file_system_without_locks_jobs_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with contextlib.ExitStack() as both:
        both.enter_context(checkpoints_locked(job(tmp_path)))
        both.enter_context(checkpoints_locked(job(tmp_path)))
