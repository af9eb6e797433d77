"""Weights & Biases: one run, which a resumed job continues.

W&B writes in a process of its own, which dies with the launcher and keeps steps in memory for a while. What it has written
is read back: offline from its files, online from the server.
"""

from __future__ import annotations

import configparser
import netrc
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.observe.loggers.steps import LoggedStep

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_CHUNK = struct.Struct("<IHB")
"""Before each chunk of a record, in the log format of LevelDB: a checksum, its length, and its place in the record."""
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_NEEDS_NO_KEY = ("offline", "disabled", "dryrun")
"""Values of ``WANDB_MODE``."""
_SETTINGS = ("api_key", "identity_token_file", "mode", "disabled")
"""What W&B's own files of settings may say, so that it needs no key from elsewhere."""


class WandbLogger:
    """Writes the metrics of each step to a run of W&B.

    Args:
        project: Its project; "": that of ``WANDB_PROJECT``, or W&B's default.
        run_id: Id of the run, unless ``WANDB_RUN_ID`` gives another one.
    """

    name = "wandb"
    shows = frozenset(("images", "histograms"))

    def __init__(self, project: str, run_id: str) -> None:
        self._project, self._run_id = project, os.environ.get("WANDB_RUN_ID") or run_id
        self._run: Any = None

    def open(self) -> Mapping[str, int]:
        """Begin or resume the run; return the last step that it has, of all metrics together."""
        import wandb

        self.close(is_done=False)
        folder = Path(os.environ.get("WANDB_DIR") or ".")
        last = max((step for file in run_files(folder, self._run_id) for step in steps_in(file)), default=-1)
        wandb.setup(wandb.Settings(silent=True))  # or it asks for a missing key on a terminal
        self._run = wandb.init(
            project=self._project or None,
            id=self._run_id,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        if not self._run.offline:
            last = self._run.step - 1
        return {"": last} if last >= 0 else {}

    def write(self, steps: Sequence[LoggedStep]) -> None:
        """Hand steps over to W&B, which writes them in this order."""
        for step in steps:
            if step.is_final:
                self._run.summary.update(dict(step.metrics))
            else:
                self._run.log({**step.metrics, **_media_of(step)}, step=step.step, commit=True)

    def close(self, *, is_done: bool) -> None:
        """Wait until W&B has written, or sent, everything."""
        if self._run is not None:
            import wandb

            run, self._run = self._run, None
            run.finish(exit_code=0 if is_done else 1)
            wandb.teardown()  # finish may return before the process of W&B has written its file


def has_credentials() -> bool:
    """Return whether W&B may have a key for its server, or needs none, without importing it; False is certain."""
    if os.environ.get("WANDB_MODE", "") in _NEEDS_NO_KEY or any(map(os.environ.get, _VARIABLES)):
        return True
    home = Path("~").expanduser()
    for path in (os.environ.get("NETRC", ""), home / ".netrc", home / "_netrc"):
        try:
            if path and netrc.netrc(path).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return any(map(_says, _settings_files(home)))


def _settings_files(home: Path) -> tuple[Path, ...]:
    folder = Path(os.environ.get("WANDB_DIR") or ".")
    own = Path(os.environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")
    return own / "settings", folder / "wandb" / "settings", folder / ".wandb" / "settings"


def _says(settings: Path) -> bool:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(settings)
    except (configparser.Error, OSError, UnicodeDecodeError):
        return False
    return any(parser.has_option("default", name) for name in _SETTINGS)


def _media_of(step: LoggedStep) -> dict[str, Any]:
    if not (step.images or step.histograms):
        return {}
    import wandb

    shown: dict[str, Any] = {name: wandb.Image(str(image.path)) for name, image in step.images.items()}
    for name, each in step.histograms.items():
        width = (each.high - each.low) / len(each.counts)
        edges = [each.low + width * number for number in range(len(each.counts) + 1)]
        shown[name] = wandb.Histogram(np_histogram=(list(each.counts), edges))
    return shown


def run_files(folder: Path, run_id: str) -> list[Path]:
    """Return the files in which W&B has kept the steps of a run, oldest first."""
    return sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"))


def steps_in(path: Path) -> Iterator[int]:
    """Yield the numbers of the steps in a file of W&B, up to the first incomplete record."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in the format of LevelDB."""
    at, parts = _FILE_HEADER_BYTES, list[bytes]()
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _CHUNK.size:
            at += left
        if at + _CHUNK.size > len(data):
            return
        _, length, place = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if place not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or at + length > len(data):
            return
        parts = [data[at : at + length]] if place in (_WHOLE, _FIRST) else [*parts, data[at : at + length]]
        at += length
        if place in (_WHOLE, _LAST):
            yield b"".join(parts)
