"""Streams under any deaths, stops and resumes: every sample is trained on once, and the weights are those of the undisturbed run."""

import dataclasses
import functools
import tempfile

import pytest
import torch
from data_training import train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from holdfast.data.stream import Stream

PHASES = ("forward", "backward", "allreduce", "optimizer")


class Numbers(IterableDataset):
    """Numbers in order, with a state or not."""

    def __init__(self, count, *, has_state):
        self.count, self.next = count, 0
        if has_state:
            self.state_dict = lambda: {"next": self.next}
            self.load_state_dict = lambda state: setattr(self, "next", state["next"])

    def __iter__(self):
        first, self.next = self.next, 0
        for number in range(first, self.count):
            self.next = number + 1
            yield torch.ones(3), number
        self.next = 0


@functools.cache
def undisturbed(count, batch_size, epochs):
    return train(Numbers(count, has_state=False), batch_size, epochs=epochs, workers=1)


def run_on(data, plan, folder):
    """Train in several runs, each on its number of workers, with kills, until a step; return the samples of each step, and the last run."""
    steps, last = {}, None
    for number, (workers, kills, stop_after) in enumerate(plan):
        known = set(steps)
        options = {"checkpoint_dir": folder, "resume": number > 0, "stop_after": stop_after}
        try:
            last = train(data(), BATCH, epochs=EPOCHS, workers=workers, kills=kills, steps=steps, **options)
        except SystemExit:
            continue
        finally:
            assert known <= set(steps)
        return steps, last
    return steps, None


BATCH, EPOCHS = 24, 2


@settings(max_examples=20)
@given(
    count=st.integers(1, 200),
    has_state=st.booleans(),
    strategy=st.sampled_from(["rollback", "restart"]),
    stops=st.lists(st.integers(0, 20), max_size=2),
    workers=st.lists(st.integers(2, 6), min_size=3, max_size=3),
    deaths=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 17), st.sampled_from(PHASES)), max_size=4
    ),
)
def test_any_deaths_and_resumes_leave_every_sample_trained_on_once(count, has_state, strategy, stops, workers, deaths):
    total = EPOCHS * -(-count // BATCH)
    stops = sorted(stop for stop in set(stops) if stop < total - 1)
    plan = [
        (
            size,
            [
                f"kill:rank={rank % size},step={step % total},phase={phase}"
                for run, rank, step, phase in deaths
                if run == number and rank % size > 0
            ],
            stop,
        )
        for number, (size, stop) in enumerate(zip(workers, [*stops, -1], strict=False))
    ]

    with tempfile.TemporaryDirectory() as folder:
        steps, last = run_on(lambda: Numbers(count, has_state=has_state), plan, folder)

    assert last is not None
    wanted = undisturbed(count, BATCH, EPOCHS)
    assert steps == wanted.steps
    assert last.weights == wanted.weights
    assert last.account == (EPOCHS * count, EPOCHS * count, 0, 0)


def test_a_stream_that_goes_back_by_one_sample_is_found_out(monkeypatch):
    def other(stream, positions):
        return real(stream, [max(0, number - 1) for number in positions])

    real, wanted = Stream.__getitems__, undisturbed(100, BATCH, EPOCHS)
    monkeypatch.setattr(Stream, "__getitems__", other)

    assert train(Numbers(100, has_state=False), BATCH, epochs=EPOCHS).steps != wanted.steps


def test_a_mark_that_is_not_checked_would_be_found_out(monkeypatch, tmp_path):
    """Without digests, a wrong state of the dataset repeats samples."""

    def wrong(stream, epoch, offset):
        mark = real(stream, epoch, offset)
        return dataclasses.replace(mark, state='{"dict": [["next", 60]]}')

    real = Stream.mark
    plan = [(3, (), 3), (2, (), -1)]
    data = lambda: Numbers(200, has_state=True)  # noqa: E731
    monkeypatch.setattr(Stream, "mark", wrong)
    assert run_on(data, plan, str(tmp_path / "checked"))[0] == undisturbed(200, BATCH, EPOCHS).steps

    monkeypatch.setattr("holdfast.data.stream._digest_of", lambda samples: 1)
    assert run_on(data, plan, str(tmp_path / "unchecked"))[0] != undisturbed(200, BATCH, EPOCHS).steps


@pytest.mark.parametrize("batch", ["global", "local"])
def test_policies_that_change_mini_batches_still_visit_every_sample_once(batch):
    kills = ("kill:rank=2,step=2", "kill:rank=1,step=4")
    for split in ("slices", "even"):
        trained = train(
            Numbers(500, has_state=False), BATCH, epochs=EPOCHS, workers=4, kills=kills, batch=batch, split=split
        )
        assert trained.samples == list(range(500)) * EPOCHS
        assert trained.account == (1000, 1000, 0, 0)
