"""TensorBoard: event files in a folder. Each step is one event, so a log has all of a step or nothing of it.

What the log has is read from the event files themselves. A launcher that was killed while it wrote has left an
incomplete event at the end of its file, at which readers stop; the next launcher writes a file of its own.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.observe.loggers.steps import LoggedStep
from holdfast.observe.loggers.targets import EVENT_FILES

_HEADER = struct.Struct("<QI")
"""Before each event: its length, and a checksum of that. After it: a checksum of the event."""
_FOOTER_BYTES = 4


class TensorBoardLogger:
    """Writes the scalars, images and histograms of each step to an event file in a folder.

    Args:
        folder: The folder; TensorBoard shows it as one run.
    """

    name = "tensorboard"
    shows = frozenset(("images", "histograms"))

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None
        self._earlier: list[Path] = []

    def open(self) -> Mapping[str, int]:
        """Return the last step of each tag in the event files; the first :meth:`write` begins a new one."""
        self.close(is_done=False)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._earlier = sorted(self._folder.glob(EVENT_FILES))
        logged: dict[str, int] = {}
        for file in self._earlier:
            for event in read_events(file):
                for value in event.summary.value:
                    logged[value.tag] = max(event.step, logged.get(value.tag, -1))
        return logged

    def _begin_file(self) -> None:
        """Begin a file whose name sorts after all earlier ones: TensorBoard reads them in this order."""
        stamps = [part for file in self._earlier if (part := file.name.split(".")[3]).isdecimal()]
        stamp = max([int(time.time()), *(int(part) + 1 for part in stamps)])
        path = self._folder / EVENT_FILES.replace("*", f"{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._write([_event(wall_time=time.time(), file_version="brain.Event:2")])
        except OSError:  # such as a full disk: the next attempt needs a file that begins well
            path.unlink()
            raise

    def write(self, steps: Sequence[LoggedStep]) -> None:
        """Write one event a step, in one call."""
        events = [_event_of(step) for step in steps]
        if self._file is None:
            self._begin_file()
        self._write(events)

    def _write(self, events: Sequence[bytes]) -> None:
        assert self._file is not None
        data = memoryview(b"".join(map(_framed, events)))
        while data:
            data = data[os.write(self._file, data) :]

    def close(self, *, is_done: bool) -> None:
        """Close the file, with its data on the disk."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)


def read_events(path: Path) -> Iterator[Any]:
    """Yield the events of a file, up to the first incomplete one."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            if checksum != _masked_crc32c(header[:8]):
                return
            data = file.read(length)
            if len(data) < length or len(file.read(_FOOTER_BYTES)) < _FOOTER_BYTES:
                return
            try:
                yield Event.FromString(data)
            except DecodeError:
                return


def _event_of(step: LoggedStep) -> bytes:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in step.metrics.items()]
    for name, image in step.images.items():
        shown = Summary.Image(
            width=image.width,
            height=image.height,
            colorspace=image.channels,
            encoded_image_string=image.path.read_bytes(),
        )
        values.append(Summary.Value(tag=name, image=shown))
    for name, each in step.histograms.items():
        width = (each.high - each.low) / len(each.counts)
        histogram = HistogramProto(
            min=each.low,
            max=each.high,
            num=sum(each.counts),
            sum=each.total,
            sum_squares=each.squares,
            bucket_limit=[each.low + width * (number + 1) for number in range(len(each.counts))],
            bucket=each.counts,
        )
        values.append(Summary.Value(tag=name, histo=histogram))
    return _event(wall_time=step.time_s, step=step.step, summary=Summary(value=values))


def _event(**fields: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    data: bytes = Event(**fields).SerializeToString()
    return data


def _framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked_crc32c(length)), data, struct.pack("<I", _masked_crc32c(data))))


def _masked_crc32c(data: bytes) -> int:
    """Return the checksum of TensorBoard's files."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    checksum: int = masked_crc32c(data)
    return checksum
