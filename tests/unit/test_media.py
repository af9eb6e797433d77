"""Images and histograms of a script: what is taken, what is encoded, and when."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from usual_records import committed, started

import holdfast
from holdfast import Histogram, Image
from holdfast.errors import ConfigError, ScriptError
from holdfast.observe.loggers.leftovers import RunRecords
from holdfast.observe.loggers.media import MediaFiles
from holdfast.observe.loggers.sink import LoggerSink
from holdfast.records.files import read_run
from holdfast.records.queued import NotTaken
from holdfast.records.types import HistogramLogged, ImageLogged, StepCommitted


def decoded(png):
    """The pixels of a PNG file without filters, as H x W x C."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        chunks[kind] = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + chunks[kind]),)
        at += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    channels = {0: 1, 2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert depth == 8
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


BYTES = np.arange(90, dtype=np.uint8).reshape(6, 5, 3)


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        (BYTES, None),
        (torch.from_numpy(BYTES), "HWC"),
        (BYTES.transpose(2, 0, 1), None),
        (torch.from_numpy(BYTES).permute(2, 0, 1).contiguous(), "CHW"),
        (torch.from_numpy(BYTES).double() / 255, None),
        (torch.from_numpy(BYTES).float().requires_grad_() / 255, None),
    ],
)
def test_an_image_is_what_it_was(given, layout):
    assert (decoded(Image(given, layout).png()) == BYTES).all()


def test_grey_and_transparent_images_and_floats_beyond_the_range():
    assert (decoded(Image(BYTES[:, :, 0]).png())[:, :, 0] == BYTES[:, :, 0]).all()
    four = np.concatenate([BYTES, BYTES[:, :, :1]], axis=2)
    assert (decoded(Image(four).png()) == four).all()
    assert decoded(Image(torch.zeros(3, 4, 1), "CHW").png()).shape == (4, 1, 3), "which would be ambiguous without"
    values = torch.tensor([[-1.0, 0.0, 0.5, 1.0, 2.0, float("nan"), float("inf")]])
    assert decoded(Image(values).png()).flatten().tolist() == [0, 0, 128, 255, 255, 0, 255]


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        (torch.zeros(3, 4, 3), None, r"of shape \(3, 4, 3\) may be H x W x C or C x H x W: say layout='HWC' or"),
        (torch.zeros(5, 4, 2), None, r"must have shape H x W, .*, where C is 1, 3 or 4, got \(5, 4, 2\)"),
        (torch.zeros(5, 4, 3), "CHW", r"must have shape C x H x W, where C is 1, 3 or 4, got \(5, 4, 3\)"),
        (torch.zeros(4), None, r"must have shape .* got \(4,\)"),
        (torch.zeros(2, 2), "WHC", "layout must be 'HWC' or 'CHW', got 'WHC'"),
        (torch.zeros(2, 2, dtype=torch.int64), None, "must be uint8, or floats from 0 to 1, got torch.int64"),
        (torch.zeros(0, 2), None, r"must have pixels, got shape \(0, 2\)"),
        (torch.zeros(1200, 1200, 3), None, r"at most 4 MiB, .*, got 4.1 MiB in shape \(1200, 1200, 3\): log"),
        ("cat.png", None, "must be a tensor or an array, got str"),
    ],
)
def test_what_is_no_image_is_refused(given, layout, message):
    with pytest.raises(ConfigError, match=message):
        Image(given, layout)


def test_a_histogram_has_bins_of_equal_width(tmp_path):
    values = torch.tensor([[0.0, 1.0], [1.0, 4.0], [float("nan"), float("inf")]])

    record = Histogram(values, bins=4).record("w", tmp_path / "x.png")

    assert (record.low, record.high, record.counts) == (0.0, 4.0, (1, 2, 0, 1))
    assert (record.total, record.squares) == (6.0, 18.0)
    assert not list(tmp_path.iterdir())
    assert sum(Histogram(torch.tensor([float("nan")])).record("w", None).counts) == 0


@pytest.mark.parametrize("value", [torch.tensor([2.0]), torch.full((7,), 2.0), np.full(3, 2)])
def test_equal_values_have_a_bin(value, tmp_path):
    record = Histogram(value).record("w", None)

    assert (record.low, record.high, sum(record.counts)) == (1.5, 2.5, len(value))


@pytest.mark.parametrize(
    ("given", "bins", "message"),
    [
        (torch.zeros(0), 64, "needs real values, got shape"),
        (torch.zeros(2, dtype=torch.complex64), 64, "needs real values"),
        (torch.zeros(2), 0, "bins must be from 1 to 512, got 0"),
        (torch.zeros(2), 513, "bins must be from 1 to 512, got 513"),
        (object(), 64, "must be a tensor or an array, got object"),
    ],
)
def test_what_is_no_histogram_is_refused(given, bins, message):
    with pytest.raises(ConfigError, match=message):
        Histogram(given, bins)


def train(run_dir, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    session = holdfast.Session(
        model, torch.optim.SGD(model.parameters(), 0.1), fabric="virtual", run_dir=str(run_dir), **settings
    )
    for step in session.steps(TensorDataset(torch.ones(12, 2)), 4, epochs=1):
        for (x,) in step:
            step.log(image=Image(torch.full((2, 3), step.number / 4)), weights=Histogram(model.weight))
            step.backward(model(x).sum())
    return session


def test_one_slice_of_each_step_is_recorded_before_the_commit(tmp_path):
    (tmp_path / "media").mkdir()

    train(tmp_path, workers=2, slices=2)

    records = read_run(tmp_path)
    kinds = [type(r) for r in records if isinstance(r, ImageLogged | HistogramLogged | StepCommitted)]
    assert kinds == [ImageLogged, HistogramLogged, StepCommitted] * 3
    images = [r for r in records if isinstance(r, ImageLogged)]
    assert [(r.step, r.name, r.width, r.height, r.channels) for r in images] == [
        (s, "image", 3, 2, 1) for s in range(3)
    ]
    assert [decoded((tmp_path / "media" / r.file).read_bytes())[0, 0, 0] for r in images] == [0, 64, 128]


def test_on_another_node_histograms_are_recorded_and_images_only_counted(tmp_path, monkeypatch):
    (tmp_path / "media-elsewhere").touch()
    monkeypatch.setattr(Image, "png", lambda self: pytest.fail("it was encoded"))

    train(tmp_path)

    records = [r for r in read_run(tmp_path) if isinstance(r, ImageLogged | HistogramLogged)]
    assert [type(r) for r in records] == [ImageLogged, HistogramLogged] * 3
    assert {r.file for r in records if isinstance(r, ImageLogged)} == {""}


def test_a_full_disk_costs_images_and_nothing_else(tmp_path, monkeypatch, capsys):
    (tmp_path / "media").mkdir()

    real = Path.write_bytes

    def full(path, data):
        if path.parent.name == "media":
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    session = train(tmp_path)

    assert session.step == 3
    assert capsys.readouterr().err.count("image of step 0 is not logged, and maybe more: No space left on device") == 1


def test_without_a_logger_nothing_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "png", lambda self: pytest.fail("it was encoded"))

    session = train(tmp_path)

    assert list(session.metrics) == ["loss"]
    assert not [r for r in read_run(tmp_path) if isinstance(r, ImageLogged | HistogramLogged)]


def test_a_metric_may_not_be_an_image():
    from holdfast.models.loss import figure_of

    with pytest.raises(ScriptError, match=r"must be logged with step\.log, in the loop over the slices of a step"):
        figure_of(Image(torch.zeros(2, 2)))


# --- in the launcher


class Logger:
    def __init__(self, *shows):
        self.name, self.shows, self.steps = f"shows {' '.join(shows)}", frozenset(shows), []

    def open(self):
        return {}

    def write(self, steps):
        for step in steps:
            assert all(image.path.read_bytes() for image in step.images.values())
            self.steps.append(step)

    def close(self, *, is_done):
        pass


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "media").mkdir()
    return tmp_path


def image(folder, step, file):
    (folder / "media" / file).write_bytes(b"png")
    return ImageLogged(t_s=0.5, rank=0, step=step, name="image", file=file, width=1, height=1, channels=1)


def histogram(step):
    return HistogramLogged(t_s=0.5, rank=0, step=step, name="w", low=0.0, high=1.0, counts=(1,), total=1.0, squares=1.0)


def test_files_go_when_every_logger_is_done_with_them(folder):
    files, run = MediaFiles(2), RunRecords(run_dir=folder, epoch_s=0.0)
    both = [LoggerSink(Logger("images", "histograms"), run, files=files) for _ in range(2)]
    # Step 0 is computed twice, and step 1 is recorded again after it was logged.
    records = [
        started(),
        image(folder, 0, "a.png"),
        image(folder, 0, "b.png"),
        histogram(0),
        committed(0, metrics={"loss": 1.0}),
    ]
    records += [
        image(folder, 1, "c.png"),
        committed(1, metrics={"loss": 1.0}),
        image(folder, 1, "d.png"),
        committed(1, metrics={"loss": 1.0}),
        committed(2, metrics={"loss": 1.0}),
    ]
    records += [image(folder, 3, "e.png")]

    both[0].take(records)
    assert len(list((folder / "media").iterdir())) == 5
    both[1].take(records)

    assert [path.name for path in (folder / "media").iterdir()] == ["e.png"], "its step is not committed"
    for sink in both:
        steps = sink._logger.steps
        assert [(step.step, *step.names) for step in steps] == [
            (0, "loss", "image", "w"),
            (1, "loss", "image"),
            (2, "loss"),
        ]
        assert steps[0].images["image"].path.name == "b.png"


def test_what_cannot_be_shown_is_counted_and_said_once(folder):
    said = []
    sink = LoggerSink(Logger("images"), RunRecords(run_dir=folder, epoch_s=0.0), say=said.append)

    for step in range(3):
        with pytest.raises(NotTaken) as found:
            sink.take(
                [started(), image(folder, step, f"{step}.png"), histogram(step), committed(step, metrics={"loss": 1.0})]
            )
        assert (str(found.value), found.value.dropped) == ("", 1)

    assert said == ["shows images shows no histograms: they are left out there"]
    assert [step.names for step in sink._logger.steps] == [("loss", "image")] * 3
    assert list((folder / "media").iterdir()) == []


def test_while_a_log_cannot_be_opened_few_files_are_kept(folder, monkeypatch):
    monkeypatch.setattr("holdfast.observe.loggers.media.MOST_WAITING", 3)
    sink = LoggerSink(logger := Logger("images"), RunRecords(run_dir=folder, epoch_s=0.0), say=(said := []).append)
    opens = logger.open
    monkeypatch.setattr(logger, "open", lambda: (_ for _ in ()).throw(OSError("gone")))
    for step in range(10):
        with pytest.raises(NotTaken, match="gone"):
            sink.take([started(), image(folder, step, f"{step}.png"), committed(step, metrics={"loss": 1.0})])
    assert sorted(path.name for path in (folder / "media").iterdir()) == ["7.png", "8.png", "9.png"]

    monkeypatch.setattr(logger, "open", opens)
    with pytest.raises(NotTaken) as found:
        sink.take([])

    assert [step.names for step in logger.steps] == [("loss",)] * 7 + [("loss", "image")] * 3
    assert found.value.dropped == 7
    assert said == [
        "shows images shows no images and histograms of steps that waited too long: they are left out there"
    ]


def test_a_file_that_is_half_written_is_removed(tmp_path, monkeypatch):
    def write(path, data):
        with path.open("wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)

    with pytest.raises(OSError, match="No space"):
        Image(torch.zeros(2, 2)).record("a", tmp_path / "a.png")

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_gone_or_elsewhere_is_left_out(folder):
    (folder / "secret").write_bytes(b"x")
    said = []
    sink = LoggerSink(Logger("images"), RunRecords(run_dir=folder, epoch_s=0.0), say=said.append)
    shape = {"width": 1, "height": 1, "channels": 1}
    images = [
        ImageLogged(t_s=0.5, rank=0, step=0, name=name, file=file, **shape)
        for name, file in (("a", "../secret"), ("b", "gone.png"), ("c", ""))
    ]

    with pytest.raises(NotTaken) as found:
        sink.take([started(), *images, committed(0, metrics={"loss": 1.0})])
    sink.close(9.0)

    assert (found.value.dropped, said) == (
        3,
        ["shows images shows no images of workers on other nodes: they are left out there"],
    )

    assert [step.names for step in sink._logger.steps] == [("loss",)]
    assert (folder / "secret").exists()
