"""torchdata's StatefulDataLoader: it is a DataLoader, and is taken apart like one."""

from __future__ import annotations

import pytest
import torch
from data_training import KILLS, train
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

stateful = pytest.importorskip("torchdata.stateful_dataloader")

BATCH = 8
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbered(Dataset):
    """Samples with their own number."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        return torch.full((3,), float(number)), number


class Numbers(IterableDataset):
    """Numbers with a state, as torchdata's documentation shows."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 300:
            self.next += 1
            yield torch.ones(3), self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_it_is_taken_apart_like_a_data_loader(shuffle):
    loader = stateful.StatefulDataLoader(Numbered(), BATCH, shuffle=shuffle, drop_last=True)

    assert train(loader, kills=KILLS) == train(DataLoader(Numbered(), BATCH, shuffle=shuffle, drop_last=True))


def test_its_sampler_is_drawn_alike():
    def loader(kind):
        return kind(Numbered(), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, 51), 60))

    assert train(loader(stateful.StatefulDataLoader), kills=KILLS) == train(loader(DataLoader))


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_stream_in_it_is_resumed_by_its_state(tmp_path, loaders):
    def loader():
        return stateful.StatefulDataLoader(Numbers(), BATCH, num_workers=loaders)

    steps = {}
    with pytest.raises(SystemExit):
        train(loader(), checkpoint_dir=str(tmp_path), stop_after=20, steps=steps)
    rest = train(loader(), checkpoint_dir=str(tmp_path), resume=True, workers=5)

    assert steps | rest.steps == train(loader()).steps
    assert rest.account == (600, 600, 0, 0)
