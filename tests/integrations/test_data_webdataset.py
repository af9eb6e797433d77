"""WebDataset: shards of samples in tar files, read whole by every worker, though RANK and WORLD_SIZE say that it is one of several."""

from __future__ import annotations

import pytest
import torch
from data_training import KILLS, train
from jobs import assert_landed, run_report
from torch.utils.data import DataLoader

wds = pytest.importorskip("webdataset")

BATCH, COUNT, SHARDS = 16, 300, 3
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)


@pytest.fixture
def shards(tmp_path):
    """Tar files of samples with a number and a tensor."""
    each = COUNT // SHARDS
    for shard in range(SHARDS):
        with wds.TarWriter(str(tmp_path / f"shard-{shard}.tar")) as tar:
            for number in range(shard * each, (shard + 1) * each):
                tar.write({"__key__": f"{number:05d}", "number.cls": number, "x.pth": torch.full((3,), float(number))})
    return f"{tmp_path}/shard-{{0..{SHARDS - 1}}}.tar"


def in_order(shards):
    return wds.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.pth", "number.cls")


def shuffled(shards):
    return (
        wds.WebDataset(shards, shardshuffle=100, detshuffle=True, seed=3)
        .shuffle(40, seed=5)
        .decode()
        .to_tuple("x.pth", "number.cls")
    )


@pytest.mark.parametrize("loaders", [0, 2])
@pytest.mark.parametrize("make", [in_order, shuffled])
def test_shards_are_trained_on_whatever_dies_and_resumed_on_other_workers(shards, tmp_path, monkeypatch, make, loaders):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")

    def run(**how):
        return train(DataLoader(make(shards), BATCH, num_workers=loaders), fabric="virtual", **how)

    undisturbed, steps = run(), {}
    assert sorted(undisturbed.samples[:COUNT]) == sorted(undisturbed.samples[COUNT:]) == list(range(COUNT))
    assert (undisturbed.samples[:COUNT] == list(range(COUNT))) == (make is in_order)

    with pytest.raises(SystemExit):
        run(kills=KILLS, checkpoint_dir=str(tmp_path / "c"), stop_after=25, steps=steps)
    rest = run(checkpoint_dir=str(tmp_path / "c"), resume=True, workers=5)

    assert steps | rest.steps == undisturbed.steps
    assert rest.account == (2 * COUNT, 2 * COUNT, 0, 0)


SCRIPT = """
import sys
import torch
import webdataset as wds
import holdfast

data = wds.WebDataset(sys.argv[1], shardshuffle=False).decode().to_tuple("x.pth", "number.cls")
model = torch.nn.Linear(3, 1)
torch.nn.init.zeros_(model.weight)
session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=1e-5))
for step in session.steps(data, batch_size=16):
    for x, number in step:
        assert (x[:, 0] == number).all()
        step.backward((model(x) - 1).square().mean())
"""


@pytest.mark.chaos
def test_workers_of_a_job_read_all_shards(shards, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kill = ("--inject", "kill:rank=1,step=5,phase=allreduce")

    report = run_report(tmp_path, "-n", 3, "--fabric", "gloo", *kill, script, shards)

    assert_landed(report, 1)
    assert report["samples"] == {"planned": COUNT, "committed": COUNT, "lost": 0, "repeated": 0}
