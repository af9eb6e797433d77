"""Streaming datasets of Hugging Face: shards, shuffling with a fixed seed, transforms, and resuming by their state."""

from __future__ import annotations

import json
import logging
import random

import numpy as np
import pytest
import torch
from data_training import KILLS, train
from torch.utils.data import DataLoader

datasets = pytest.importorskip("datasets")

BATCH, COUNT, SHARDS = 16, 500, 4
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of lines with numbers, one for each shard."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    each = COUNT // SHARDS
    for shard in range(SHARDS):
        lines = [json.dumps({"number": number}) for number in range(shard * each, (shard + 1) * each)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / f"{shard}.jsonl") for shard in range(SHARDS)]


def stream(files):
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def with_noise(row):
    return {"number": row["number"], "noise": float(torch.rand(())) + random.random() + np.random.random()}


def numbers(seen=None):
    def of(batch):
        if seen is not None:
            seen.append(batch["noise"].tolist())
        return batch["number"]

    return of


KINDS = {
    "in order": lambda files: stream(files),
    "shuffled": lambda files: stream(files).shuffle(seed=4, buffer_size=50),
    "mapped": lambda files: stream(files).map(with_noise),
    "batched": lambda files: stream(files).map(lambda rows: rows, batched=True, batch_size=7),
    "for torch": lambda files: stream(files).with_format("torch"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_streaming_dataset_is_trained_on_whatever_dies_and_resumed_on_other_workers(files, tmp_path, kind, caplog):
    make, checkpoints = KINDS[kind], str(tmp_path / "checkpoints")
    how = {"numbers": numbers()}
    undisturbed = train(make(files), BATCH, **how)
    assert sorted(undisturbed.samples[:COUNT]) == sorted(undisturbed.samples[COUNT:]) == list(range(COUNT))
    if kind == "shuffled":
        assert undisturbed.samples[:COUNT] != undisturbed.samples[COUNT:], "set_epoch was called"
        assert undisturbed.samples[:COUNT] != list(range(COUNT))

    steps = {}
    with pytest.raises(SystemExit):
        train(make(files), BATCH, kills=KILLS, checkpoint_dir=checkpoints, stop_after=40, steps=steps, **how)
    with caplog.at_level(logging.ERROR):
        rest = train(make(files), BATCH, checkpoint_dir=checkpoints, resume=True, workers=5, **how)

    assert steps | rest.steps == undisturbed.steps
    assert rest.weights == undisturbed.weights
    assert rest.account == (2 * COUNT, 2 * COUNT, 0, 0)


def test_the_state_of_a_shuffle_buffer_is_not_believed(files, tmp_path, capsys):
    def make():
        return stream(files).shuffle(seed=4, buffer_size=50)

    with pytest.raises(SystemExit):
        train(make(), BATCH, checkpoint_dir=str(tmp_path / "c"), stop_after=20, numbers=numbers())
    train(make(), BATCH, checkpoint_dir=str(tmp_path / "c"), resume=True, numbers=numbers())

    assert "does not continue at sample 320 after load_state_dict, as with a shuffle buffer" in capsys.readouterr().err


def test_noise_of_a_transform_is_the_same_in_a_loader_process_and_after_deaths(files):
    def trained(*, loaders, kills=()):
        seen = []
        loader = DataLoader(stream(files).map(with_noise), BATCH, num_workers=loaders)
        made = train(loader, kills=kills, numbers=numbers(seen), epochs=1)
        return made, sorted(map(str, seen))

    first, noise = trained(loaders=0)
    again, more = trained(loaders=1, kills=KILLS)

    assert again == first
    assert set(more) == set(noise)


def test_a_dataset_with_a_length_is_no_stream(files):
    rows = datasets.Dataset.from_dict({"number": list(range(50))})

    trained = train(DataLoader(rows.with_format("torch"), BATCH, shuffle=True), numbers=numbers(), kills=KILLS)

    assert sorted(trained.samples) == sorted(list(range(50)) * 2)
    assert trained.account == (100, 100, 0, 0)
