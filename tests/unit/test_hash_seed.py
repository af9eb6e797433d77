"""The seed of Python's hashes of a job: the checkpoint's, that of the environment, or the job's."""

from __future__ import annotations

import functools
import json
import platform
from types import SimpleNamespace

import pytest

from holdfast.config import Settings
from holdfast.launch.hash_seed import HASH_SEED, hash_seed, hash_seed_line
from holdfast.state.context import JobContext, PlatformState
from holdfast.state.hash_seed import compare_hashes_with_checkpoint, hash_digest


@pytest.fixture
def saved(tmp_path):
    """A directory of checkpoints, of which the newest is incomplete and one is older than seeds."""

    def save(step, text):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "manifest.json").write_text(text)

    save(4, json.dumps({"info": {"hashes": {"seed": "3", "digest": 1}}}))
    save(8, json.dumps({"info": {"hashes": {"seed": "77", "digest": 1}}}))
    save(12, "{")
    (tmp_path / "step-00000016").mkdir()
    return str(tmp_path)


def test_it_is_the_jobs_unless_the_environment_or_a_checkpoint_has_one(saved, monkeypatch):
    monkeypatch.delenv(HASH_SEED, raising=False)
    assert hash_seed(Settings(seed=5)) == "5"
    assert hash_seed(Settings(seed=2**32 + 5)) == "5"
    assert hash_seed(Settings(seed=5, checkpoint_dir=saved)) == "5"
    assert hash_seed(Settings(seed=5, checkpoint_dir=saved, resume=True)) == "77"
    assert hash_seed(Settings(seed=5, checkpoint_dir=f"file://{saved}", resume=True)) == "77"
    assert hash_seed(Settings(seed=5, checkpoint_dir="s3://bucket/x", resume=True)) == "5"
    assert hash_seed_line(Settings(checkpoint_dir=saved, resume=True)) == ""

    monkeypatch.setenv(HASH_SEED, "random")
    assert hash_seed(Settings(seed=5)) == "5", "each worker would have another"
    assert hash_seed_line(Settings(checkpoint_dir=saved, resume=True)) == ""

    monkeypatch.setenv(HASH_SEED, "6")
    assert hash_seed(Settings(seed=5)) == "6"
    assert hash_seed(Settings(checkpoint_dir=saved, resume=True)) == "77"
    assert hash_seed_line(Settings(checkpoint_dir=saved, resume=True)) == (
        "PYTHONHASHSEED is 77 as when the checkpoint was made, and not 6 as in the environment"
    )
    assert hash_seed_line(Settings(checkpoint_dir=saved)) == ""


@pytest.mark.parametrize(
    ("seed", "advice"),
    [
        ("5", "PYTHONHASHSEED is 5 as then, but Python is {now}; use Python 3.9 again"),
        ("6", "export PYTHONHASHSEED=6"),
        ("", "the seed was random; for later jobs, export PYTHONHASHSEED=0"),
    ],
)
def test_other_hashes_than_the_checkpoints_are_said_with_what_to_do(seed, advice, monkeypatch, capsys):
    monkeypatch.setattr("holdfast.state.hash_seed._AT_START", "5")
    job = SimpleNamespace(is_lead=True, platform=PlatformState(), comm=SimpleNamespace(local_ranks=(0,)))
    job.warn = functools.partial(JobContext.warn, job)

    for _ in range(2):
        compare_hashes_with_checkpoint(job, {"seed": seed, "digest": hash_digest() + 1}, "3.9")

    said = "hash() of texts and orders of sets are not the same as when the checkpoint was made: "
    now = platform.python_version()
    assert capsys.readouterr().err == f"holdfast: worker 0: {said}{advice.format(now=now)}\n", "once"
