"""The results of rows, a file each, below ``out/bench``: by commit and machine, so that a run that was cut short resumes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, cpu_name

from rows.row import Measured, Row

MEASURED = ("src", "benchmarks")
"""What a result depends on: a commit that changes nothing below these folders leaves results valid."""
GIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a row.

    Args:
        row: Its name.
        size: ``tiny``, ``usual`` or ``long``.
        commands: The commands that ran.
        versions: The versions of the peers, by their keys, and of what Holdfast ran on, as ``own torch``.
        date: The day, in UTC.
        seconds: How long it took.
        failed: Why it has no values, "" if it has.
        busy: What made the machine busy meanwhile, "" if nothing did.
        ours: See :class:`~rows.row.Measured`, as the following.
        peers: Values of the peers.
        limit: Values of the limit.
        paired: Whether values were measured in blocks.
    """

    row: str
    size: str
    commands: list[list[str]]
    versions: dict[str, str]
    date: str = ""
    seconds: float = 0.0
    failed: str = ""
    busy: str = ""
    ours: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    limit: list[float] = field(default_factory=list)
    paired: bool = False

    @property
    def measured(self) -> Measured:
        """Its values."""
        return Measured(self.ours, self.peers, self.limit, self.paired)

    def is_of(self, row: Row, size: str, versions: dict[str, str]) -> bool:
        """Return whether this is the row as it is now: same commands, same versions."""
        commands = [list(command) for command in row.commands_of(size)]
        return (self.size, self.commands, self.versions) == (size, commands, versions)

    def counts_for(self, row: Row, size: str, versions: dict[str, str]) -> bool:
        """Return whether the row need not be measured again: it is the same, and the machine was not busy."""
        return self.is_of(row, size, versions) and not self.failed and not self.busy


class Results:
    """The folder with the results of this commit on this machine.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, row: str, size: str) -> Path:
        """Return the file of a row."""
        return self.folder / f"{row}-{size}.json"

    def read(self, row: str, size: str) -> Result | None:
        """Return the result of a row; None if there is none, or none that this version can read."""
        try:
            return Result(**json.loads(self.path(row, size).read_text()))
        except (OSError, ValueError, TypeError):  # cut short, or of another version of this program: measured again
            return None

    def written_ns(self, row: str, size: str) -> int:
        """Return when the result of a row was written, in nanoseconds; 0 if there is none."""
        try:
            return self.path(row, size).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def write(self, result: Result) -> None:
        """Write the result of a row: complete, or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(result.row, result.size)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(result), indent=1) + "\n")
        new.replace(path)


def folder_of(root: Path) -> Path:
    """Return the folder of this commit and this machine below ``root``."""
    return root / commit_name() / machine_name()


def commit_name() -> str:
    """Return the newest commit that changed what is measured; changes that are not committed are part of the name."""
    commit = _git("log", "-1", "--format=%h", "--", *MEASURED) or "no-commit"
    changed = _git("status", "--porcelain", "--", *MEASURED)
    if not changed:
        return commit
    content = _git("diff", "HEAD", "--", *MEASURED) + changed
    for name in _git("ls-files", "--others", "--exclude-standard", "--", *MEASURED).splitlines():
        content += (ROOT / name).read_text(errors="replace")
    return f"{commit}-changed-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def machine_name() -> str:
    """Return a name for this machine: its host name, its processor, how many of them."""
    words = f"{platform.node()} {os.cpu_count()} x {cpu_name()}"
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-").lower()


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=GIT_S, check=False
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def as_dict(measured: Measured) -> dict[str, Any]:
    """Return the values as the fields of a :class:`Result`."""
    return {
        "ours": list(measured.ours),
        "peers": {peer: list(values) for peer, values in measured.peers.items()},
        "limit": list(measured.limit),
        "paired": measured.paired,
    }
