"""The seed of Python's hashes of a job: the checkpoint's, that of the environment, or the job's."""

from __future__ import annotations

import json

import pytest

from holdfast.config import Settings
from holdfast.launch.hash_seed import HASH_SEED, hash_seed, hash_seed_line


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
