"""Streams: each sample has a position, whatever reads it, and what cannot be continued is read again or refused."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import numpy as np
import planned
import pytest
import torch
from data_training import KILLS, train
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import holdfast
from holdfast.data.ledger import PositionRanges, SampleCounts, StreamLedger
from holdfast.data.plan import PlanCursor
from holdfast.data.stream import CHUNK, Stream, StreamMark
from holdfast.data.stream_state import decode_state, encode_state
from holdfast.errors import CheckpointError, ConfigError, InternalError
from holdfast.tools.doctor.script import ScriptInspected, ScriptInspector

BATCH = 20


class Numbers(IterableDataset):
    """Numbers, each with noise from all generators; notes how many samples were read."""

    read = 0

    def __init__(self, count=200):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            self.read += 1
            noise = float(torch.rand(()) + np.random.random() + random.random())
            yield torch.full((3,), noise), number


class Stateful(Numbers):
    """Continues where its state says."""

    next = 0
    early = False

    def __iter__(self):
        while self.next < self.count:
            number = self.next
            self.next += not self.early  # afterwards, the state has the sample that was given, not the next
            self.read += 1
            yield torch.full((3,), float(number)), number
            self.next = number + 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next, "kept": torch.arange(3), "more": ({1: b"x"}, np.float32(2))}

    def load_state_dict(self, state):
        assert state["kept"].tolist() == [0, 1, 2]
        assert state["more"] == ({1: b"x"}, 2)
        self.next = state["next"]


class Buffered(Stateful):
    """Shuffles in a buffer, which its state leaves out."""

    def __iter__(self):
        rng, buffer = random.Random(1), []
        for _, number in super().__iter__():
            buffer.append(number)
            if len(buffer) == 40:
                yield torch.ones(3), buffer.pop(rng.randrange(40))
        rng.shuffle(buffer)
        for number in buffer:
            yield torch.ones(3), number


class Iterable:
    """Can be iterated, and no more."""

    def __iter__(self):
        return iter(Numbers())


def noises(seen):
    """Return a function that notes the noise in a batch and returns the numbers."""

    def note(inputs):
        seen.append(inputs[0].tolist())
        return inputs[1]

    return note


def test_all_kinds_of_stream_give_the_same_samples_and_the_same_noise():
    trained, noise = [], []
    for data, sizes in (
        (Numbers(), (BATCH,)),
        (DataLoader(Numbers(), BATCH), ()),
        (DataLoader(Numbers(), BATCH, num_workers=1, prefetch_factor=3), ()),
        (Iterable(), (BATCH,)),
        (lambda: iter(Numbers()), (BATCH,)),
    ):
        torch.manual_seed(len(trained))
        seen = []
        trained.append(train(data, *sizes, kills=KILLS, numbers=noises(seen)))
        noise.append(sorted(map(str, seen)))

    assert all(each == trained[0] for each in trained)
    assert all(each == noise[0] for each in noise)
    assert trained[0].samples == list(range(200)) * 2
    assert trained[0].account == (400, 400, 0, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 130])
@pytest.mark.parametrize("batch_size", [13, 64, 128])
def test_an_epoch_ends_where_the_stream_ends(count, batch_size, drop_last):
    kept = count - count % batch_size if drop_last else count
    if not kept:
        with pytest.raises(ConfigError, match="drop_last leaves no batch"):
            train(Numbers(count), batch_size, options={"drop_last": drop_last})
        return

    trained = train(Numbers(count), batch_size, options={"drop_last": drop_last}, workers=2, slices=2)

    assert trained.samples == list(range(kept)) * 2
    assert trained.account == (2 * kept, 2 * kept, 0, 0)
    full = [batch_size] * (kept // batch_size) + [kept % batch_size] * (kept % batch_size > 0)
    assert [len(numbers) for numbers in trained.steps.values()] == full * 2


def resumed(folder, data, again, stop_after=5, numbers=lambda inputs: inputs[1], **options):
    """Train until a step, resume with another dataset object on other workers, and return all samples of the second run."""
    steps = {}
    with pytest.raises(SystemExit):
        train(data, BATCH, checkpoint_dir=str(folder), stop_after=stop_after, steps=steps, numbers=numbers, **options)
    rest = train(again, BATCH, checkpoint_dir=str(folder), resume=True, workers=4, numbers=numbers, **options)
    assert sorted([*steps, *rest.steps]) == list(range(len(steps) + len(rest.steps)))
    assert rest.account == (400, 400, 0, 0)
    return [number for number in (steps | rest.steps).items() for number in number[1]]


@pytest.mark.parametrize(
    ("loaders", "kind", "stop_after"),
    [
        (0, Numbers, 9),  # at the end of an epoch
        (0, Buffered, 5),
        (1, Stateful, 12),
        (1, Buffered, 5),
    ],
)
def test_a_resumed_run_continues_with_the_next_sample(tmp_path, kind, stop_after, loaders):
    samples = resumed(tmp_path, kind(), kind(), stop_after, options={"num_workers": loaders})

    assert samples == train(kind(), BATCH).samples
    assert sorted(samples) == sorted(list(range(200)) * 2)


def test_a_state_makes_it_unnecessary_to_read_the_epoch_again(tmp_path):
    again = Stateful()
    resumed(tmp_path, Stateful(), again)

    assert again.read == (200 - CHUNK) + 200


def test_a_state_that_leads_elsewhere_is_noticed(tmp_path, capsys):
    first, again = Buffered(), Buffered()
    resumed(tmp_path / "buffer", first, again)
    line = "does not continue at sample 64 after load_state_dict, as with a shuffle buffer"
    assert capsys.readouterr().err.count(line) == 1

    early = Stateful()
    early.early = True
    resumed(tmp_path / "early", early, Stateful())
    assert "does not continue at sample 64 after load_state_dict" in capsys.readouterr().err


def test_a_state_that_cannot_be_saved_is_said_and_the_epoch_is_read_again(tmp_path, capsys):
    class Odd(Numbers):
        def state_dict(self):
            return {"open file": object()}

        def load_state_dict(self, state):
            raise AssertionError

    resumed(tmp_path, Odd(), Odd())

    assert "the stream's state_dict has values that cannot be saved in a checkpoint" in capsys.readouterr().err


def test_a_run_is_not_resumed_with_another_stream(tmp_path):
    class Other(Numbers):
        def __iter__(self):
            return (reversed(list(super().__iter__()))).__iter__()

    not_it = "the stream of epoch 0 is not the one that was read before"
    for name, data, again, line in (
        ("a", Numbers(), Other(), not_it),
        ("b", Numbers(), Numbers(50), not_it),
        ("c", Numbers(), list(Numbers()), "was made with a stream and this run has a dataset with a length"),
        ("d", list(Numbers()), Numbers(), "was made with a dataset with a length and this run has a stream"),
    ):
        with pytest.raises(ConfigError, match=line):
            resumed(tmp_path / name, data, again)


class Exhausted(IterableDataset):
    """Can be read once."""

    def __init__(self):
        self.rest = iter(range(10))

    def __iter__(self):
        for number in self.rest:
            yield torch.ones(3), number


@pytest.mark.parametrize(
    ("data", "options", "line"),
    [
        (lambda: Numbers(0), {}, "the stream gives no samples in epoch 0: it must have some"),
        (Exhausted, {}, "the stream gives no samples in epoch 1: it must have some, and begin again for every epoch"),
        (
            lambda: iter(Numbers()),
            {},
            "a generator can be read only once, and a resumed run must read it again: pass a function",
        ),
        (Numbers, {"shuffle": True}, "a stream cannot be shuffled by session.steps"),
        (Numbers, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (Numbers, {"batch_size": None}, "batch_size is missing"),
        (Numbers, {"num_workers": -1}, "num_workers must be at least 0, got -1"),
        (
            lambda: DataLoader(Numbers(), batch_size=None),
            {"batch_size": None},
            "batch_size=None does not make batches of samples",
        ),
        (lambda: 5, {}, "dataset must have len and .*, got int"),
    ],
)
def test_what_cannot_be_done_is_one_line(data, options, line):
    with pytest.raises(ConfigError, match=line) as raised:
        train(data(), options={"batch_size": BATCH} | options)

    assert "\n" not in str(raised.value)


def test_more_loader_processes_than_one_are_said(capsys):
    trained = train(DataLoader(Numbers(), BATCH, num_workers=2))

    assert trained.samples == list(range(200)) * 2
    assert capsys.readouterr().err.count("each worker has one loader process instead of num_workers=2") == 1


class Sharded(Numbers):
    """Gives each loader process its part, as the documentation of torch shows, and takes its range from the environment."""

    def __iter__(self):
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return (sample for sample in super().__iter__() if sample[1] % (parts * size) == part + parts * rank)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_stream_that_divides_itself_gives_all_samples(monkeypatch, loaders):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert train(DataLoader(Sharded(), BATCH, num_workers=loaders), fabric="virtual").samples == list(range(200)) * 2
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "3")


class Dying(Numbers):
    """Kills its loader process at a sample, once."""

    def __init__(self, folder, count=200):
        super().__init__(count)
        self.killed = Path(folder) / "killed"

    def __iter__(self):
        for sample in super().__iter__():
            if sample[1] == 150 and get_worker_info() is not None and not self.killed.exists():
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def test_a_lost_loader_process_is_restarted_and_no_sample_is_missed(tmp_path, capfd):
    trained = train(DataLoader(Dying(tmp_path), BATCH, num_workers=1, prefetch_factor=1))

    assert trained.samples == list(range(200)) * 2
    assert "the process that reads the stream was lost" in capfd.readouterr().err


def test_worker_init_is_called_in_the_loader_process_with_the_stream_itself():
    class Opened(Numbers):
        offset = 0

        def __iter__(self):
            return ((x, number + self.offset) for x, number in super().__iter__())

    def open_it(number):
        get_worker_info().dataset.offset = 1000 + number

    loader = DataLoader(Opened(), BATCH, num_workers=1, worker_init_fn=open_it)
    assert set(train(loader).samples) == set(range(1000, 1200))


def test_a_step_that_is_done_again_has_samples_that_collate_has_not_changed():
    class Rows(Numbers):
        def __iter__(self):
            return ({"number": number} for _, number in super().__iter__())

    def pop(samples):
        return torch.tensor([sample.pop("number") for sample in samples])

    loader = DataLoader(Rows(), BATCH, collate_fn=pop)
    assert train(loader, kills=KILLS, numbers=lambda numbers: numbers).samples == list(range(200)) * 2


def test_each_epoch_knows_its_number_though_it_is_resumed(tmp_path):
    class Shuffled(Numbers):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = random.Random(self.epoch).sample(range(200), 200)
            return ((torch.ones(3), number) for number in order)

    samples = resumed(tmp_path, Shuffled(), Shuffled(), stop_after=12)
    assert samples[:200] == random.Random(0).sample(range(200), 200)
    assert samples[200:] == random.Random(1).sample(range(200), 200)


class Counting(IterableDataset):
    """Counts its epochs itself, and shuffles in another order in each, as datasets of webdataset do."""

    epoch = -1

    def __iter__(self):
        self.epoch += 1
        order = random.Random(self.epoch).sample(range(200), 200)
        yield from ((torch.ones(3), number) for number in order)


@pytest.mark.parametrize(("stop_after", "loaders"), [(9, 0), (12, 0), (12, 1)])
def test_a_stream_that_counts_its_epochs_is_given_the_right_count(tmp_path, stop_after, loaders):
    samples = resumed(tmp_path, Counting(), Counting(), stop_after, options={"num_workers": loaders})

    # Each loader process begins with the dataset of the script, as those of a DataLoader do.
    counts = [0, 0 if loaders else 1]
    assert samples == [number for count in counts for number in random.Random(count).sample(range(200), 200)]


def loops(data, folder="", stops=(), **settings):
    """Train in one loop for each of three epochs; return the samples of each step. ``stops`` are steps that end a loop."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = holdfast.Session(model, optimizer, workers=3, slices=4, seed=3, checkpoint_dir=folder, **settings)
    steps = {}
    with contextlib.suppress(SystemExit):
        for _ in range(3):
            for step in session.steps(DataLoader(data, BATCH)):
                steps[step.number] = []
                if step.number in stops:
                    step.stop()
                for x, numbers in step:
                    steps[step.number] += numbers.tolist()
                    step.backward(model(x).mean())
    return steps


@pytest.mark.parametrize(("kind", "stop_after"), [(Numbers, 9), (Stateful, 12), (Counting, 24)])
def test_a_loop_for_each_epoch_is_resumed_where_it_stopped(tmp_path, kind, stop_after):
    steps = loops(kind(), str(tmp_path), stop_after=stop_after)
    rest = loops(kind(), str(tmp_path), resume=True)

    assert list(steps) == list(range(stop_after + 1))
    assert steps | rest == loops(kind())
    assert sorted(number for numbers in (steps | rest).values() for number in numbers) == sorted(list(range(200)) * 3)


@pytest.mark.parametrize("kind", [Numbers, Stateful])
def test_a_loop_that_ends_early_leaves_the_next_one_the_whole_stream(kind):
    steps = loops(kind(), stops=[4, 8])

    numbers = [number for step in steps.values() for number in step]
    assert numbers == [*range(5 * BATCH), *range(4 * BATCH), *range(200)]


class Pairs(Numbers):
    """Inputs and targets."""

    def __iter__(self):
        return ((torch.full((3,), float(number)), torch.ones(1)) for _, number in super().__iter__())


def square(output, target):
    return (output - target).square().mean()


def split(kind):
    """Return a model that is split among workers, with weights that are always the same."""
    make = lambda: torch.nn.Linear(3, 1)  # noqa: E731
    torch.manual_seed(0)
    return holdfast.Pipeline([make], square) if kind == "pipeline" else holdfast.Sharded(make(), shards=2)


@pytest.mark.parametrize("kind", ["pipeline", "sharded"])
def test_models_that_are_split_are_trained_on_a_stream(kind):
    def account(*kills):
        settings = {"workers": 3, "slices": 4, "seed": 3, "faults": planned.faults(*kills)}
        session = holdfast.Session(model := split(kind), lambda p: torch.optim.SGD(p, lr=1e-6), **settings)
        for step in session.steps(DataLoader(Pairs(), BATCH), epochs=2):
            if kind == "pipeline":
                step.compute()
                continue
            for x, y in step:
                step.backward(square(model.module(x), y))
        totals = session._job.loops.totals
        return (totals.planned, totals.committed, totals.lost, totals.repeated), session._job.loops.finished[0].sha256

    undisturbed = account()
    assert undisturbed[0] == (400, 400, 0, 0)
    assert account("kill:rank=1,step=7") == undisturbed


@pytest.mark.parametrize(
    "data", [lambda: Pairs(), lambda: [(torch.ones(3), torch.ones(1))] * 40], ids=["stream", "list"]
)
def test_the_doctor_looks_at_a_data_loader(tmp_path, data):
    model = torch.nn.Linear(3, 1)
    session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), workers=2)
    loop = session._open(DataLoader(data(), 8))
    look = ScriptInspector(tmp_path / "shared.pt")
    looked = look(session._trainable, loop.plan, loop.source.dataset, loop.source.collate)

    def script():
        for step in looked:
            for x, y in step:
                step.backward(square(model(x), y))

    with pytest.raises(ScriptInspected):
        script()
    assert look.seen.samples == 4
    assert not look.seen.dataset_again
    assert not look.seen.step.again


# -- parts


def test_a_stream_gives_what_is_kept_until_it_is_forgotten():
    stream = Stream(Numbers(300), seed=1)

    assert stream.limit(0, 100) == 100
    stream.close()
    assert stream.limit(0, 1000) == 300
    assert [number for _, number in stream.__getitems__([0, 99, 299])] == [0, 99, 299]
    stream.forget(0, 130)
    assert [number for _, number in stream.__getitems__([130, 299])] == [130, 299]
    with pytest.raises(InternalError, match="samples 1 to 130 of a stream are not kept"):
        stream.__getitems__([1, 130])
    mark = stream.mark(0, 130)
    assert (mark.position, mark.state) == (128, None)

    stream.close()
    assert stream.limit(0, 1000) == 300
    read = stream.dataset.read
    stream.seek(0, 140, mark)
    assert stream.limit(0, 150) == 150
    assert stream.dataset.read == read, "it was still there"
    stream.seek(0, 10, StreamMark(first=mark.first))
    assert stream.must_seek
    assert stream.limit(0, 20) == 20
    assert [number for _, number in stream.__getitems__([10])] == [10]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"a": [1, 2.5, "x", None, True], 3: (4, b"\x00\xff"), "nested": {"tuple": [1]}},
        [float("inf"), -0.0, 2**70],
        {},
    ],
)
def test_a_state_survives_as_text(state):
    assert decode_state(encode_state(state)) == state


def test_tensors_and_arrays_survive_as_text():
    state = {
        "t": torch.tensor([[1.5, -2]], dtype=torch.bfloat16),
        "e": torch.empty(0, 3),
        "a": np.arange(6).reshape(2, 3),
    }
    again = decode_state(encode_state({**state, "s": np.int16(7)}))

    assert again["t"].dtype == torch.bfloat16
    assert torch.equal(again["t"], state["t"])
    assert again["e"].shape == (0, 3)
    assert np.array_equal(again["a"], state["a"])
    assert again["s"] == 7
    assert again["s"].dtype == np.int16
    assert encode_state({"x": object()}) is None


def test_a_state_with_a_kind_of_array_that_numpy_cannot_parse_is_refused():
    text = encode_state({"a": np.arange(3)}).replace("<i8", "<,i8")

    with pytest.raises(CheckpointError, match="the checkpoint holds no state of a stream"):
        decode_state(text)


def test_ranges_are_sets_of_numbers():
    rng = random.Random(0)
    for _ in range(200):
        ranges, wanted = PositionRanges(), set()
        for _ in range(8):
            start = rng.randrange(30)
            stop = start + rng.randrange(1, 8)
            known = {number for low, high in ranges.add(start, stop) for number in range(low, high)}
            assert known == wanted & set(range(start, stop))
            wanted |= set(range(start, stop))
        until = rng.randrange(40)
        assert (ranges.count(), ranges.count(until)) == (len(wanted), sum(number < until for number in wanted))
        assert PositionRanges(ranges.as_list()).as_list() == ranges.as_list()


def test_the_ledger_of_a_stream_finds_what_is_lost_and_what_is_repeated():
    ledger = StreamLedger(0)
    ledger.commit(0, np.array([0, 1, 2, 5, 6]))
    ledger.commit(0, np.array([6, 7, 2]))
    assert ledger.account(PlanCursor(epoch=0, offset=9)) == SampleCounts(planned=9, committed=6, lost=3, repeated=2)

    again = StreamLedger(0)
    again.load_state_dict(ledger.state_dict())
    again.end_epoch(8)
    again.commit(1, np.arange(4))
    assert again.account(PlanCursor(epoch=1, offset=4)) == SampleCounts(planned=12, committed=10, lost=2, repeated=2)
    with pytest.raises(InternalError):
        again.commit(0, np.arange(4))

    later = StreamLedger(2, begun=5)
    later.commit(2, np.arange(5, 8))
    assert later.account(PlanCursor(epoch=2, offset=9)) == SampleCounts(planned=4, committed=3, lost=1)
    later.end_epoch(10)
    assert later.account(PlanCursor(epoch=3, offset=2)) == SampleCounts(planned=7, committed=3, lost=4)


def test_a_stream_can_begin_within_an_epoch_and_keeps_nothing_of_what_is_before():
    stream = Stream(Numbers(1000), seed=1)
    stream.seek(0, 700, StreamMark())

    assert stream.limit(0, 710) == 710
    assert [number for _, number in stream.__getitems__([700, 709])] == [700, 709]
    assert len(stream._kept) == 2
    with pytest.raises(InternalError):
        stream.__getitems__([600])
