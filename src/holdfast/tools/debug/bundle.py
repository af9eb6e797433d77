"""Writes a debug bundle: one archive with what is known about a run, without secrets.

Everything in it is text that passed :func:`~holdfast.tools.debug.redaction.redact`. Nothing is unpickled or executed, links
are not followed, and names in the archive are relative, all in one folder.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.records.paths import event_files, events_path
from holdfast.tools.debug.redaction import helpful, redactor

_MOST_LOG_BYTES = 1 << 20
_MOST_RECORD_BYTES = 16 << 20
"""Of longer files the end is kept, from a line on."""
_MOST_OF_FOLDER = 256 << 20
"""Bytes of all files of a folder: if there are many, each has a smaller share."""
_MOST_FILES = 2048
_PACKAGES = (
    "holdfast",
    "torch",
    "numpy",
    "mpi4py",
    "openmpi",
    "accelerate",
    "transformers",
    "lightning",
    "ray",
    "py-spy",
)
_RUN_FILES = ("report.json", "plan.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSource:
    """What a bundle is made from.

    Args:
        report_dir: The folder of ``holdfast run --report``; None for a job without one.
        run_dir: The directory of a running job, with its records; None after its end.
        log_dir: The folder of the workers' output; None if there is none.
        environment: Variables of the job, or of this process if the job is over.
        live: Further texts by name, such as stacks of running workers.
        notes: What is missing, and why.
    """

    report_dir: Path | None = None
    run_dir: Path | None = None
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write_bundle(source: BundleSource, out: Path) -> list[str]:
    """Write the bundle, a ``.tar.gz`` that only this user can read, and return the names of its files.

    Args:
        source: What it is made from.
        out: Its file; an existing one is replaced once the new one is complete.

    Raises:
        ConfigError: if it cannot be written.
    """
    hide = redactor(source.environment)
    notes = list(source.notes)
    names: list[str] = []
    top = out.name.removesuffix(".tar.gz").removesuffix(".tgz") or "bundle"
    draft = out.with_name(f".{out.name}.{os.getpid()}.draft")
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, text in _texts(source, notes):  # one at a time: together they may be larger than the memory
                _add(archive, f"{top}/{name}", hide(text))
                names.append(name)
            about = {
                "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "files": sorted(names),
                "notes": [*map(hide, notes)],
            }
            _add(archive, f"{top}/bundle.json", json.dumps(about, indent=1) + "\n")
        draft.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return sorted([*names, "bundle.json"])


def versions() -> dict[str, Any]:
    """Return the versions of Python, the kernel, the C library and the packages that matter; "" if not installed."""
    return {
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def read_end(path: Path, most_bytes: int) -> str | None:
    """Return the end of a regular file, from the beginning of a line on; None if it is none, also not a link to one."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(file, "rb") as raw:
        size = os.fstat(file).st_size
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        raw.seek(max(0, size - most_bytes))
        data = raw.read(most_bytes)
    if size > most_bytes:
        data = b"(the beginning was left out)\n" + data.partition(b"\n")[2]
    return data.decode(errors="replace")


def _texts(source: BundleSource, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file; what cannot be read is added to ``notes``."""
    yield "versions.json", json.dumps(versions(), indent=1) + "\n"
    yield "environment.json", json.dumps(helpful(source.environment), indent=1) + "\n"
    yield from source.live.items()
    if (
        source.run_dir is None and source.report_dir is not None
    ):  # of a running job they would be those of an earlier run
        events = [path.name for path in event_files(source.report_dir)] or [events_path(source.report_dir).name]
        yield from _read(source.report_dir, (*_RUN_FILES, *events[-_MOST_FILES:]), _MOST_RECORD_BYTES, notes)
    if source.run_dir is not None:
        names = [path.name for path in _files(source.run_dir, "records-*.jsonl")]
        yield from _read(source.run_dir, names, _MOST_RECORD_BYTES, notes, "records/")
    if source.log_dir is not None:
        names = [path.name for path in _files(source.log_dir, "*.log")]
        yield from _read(source.log_dir, names, _MOST_LOG_BYTES, notes, "logs/")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))[:_MOST_FILES]


def _read(
    folder: Path, names: Sequence[str], most_bytes: int, notes: list[str], under: str = ""
) -> Iterator[tuple[str, str]]:
    left = _MOST_OF_FOLDER
    for number, name in enumerate(names):
        share = min(most_bytes, left // (len(names) - number))  # what earlier files did not need goes to the later ones
        text = read_end(folder / name, share)
        if text is None:
            notes.append(f"{under}{name}: not there, or not a regular file")
        else:
            left = max(0, left - len(text))
            yield f"{under}{name}", text


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    entry = tarfile.TarInfo(name)  # of no user and no group
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))
