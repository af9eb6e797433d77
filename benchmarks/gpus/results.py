"""What a section found: written to its file after every figure, so that a run that is cut short keeps what it has."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = "complete"


class SectionFailed(Exception):
    """A section cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Where:
    """What a section runs on.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: Sizes and counts that take seconds, to see whether the section works.
    """

    device: str
    tiny: bool

    @property
    def is_gpu(self) -> bool:
        """Whether figures count: those of a CPU only show that a section works."""
        return self.device == "cuda"

    def size(self, full: int, tiny: int) -> int:
        """Return a size or a count."""
        return tiny if self.tiny else full

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
        if self.is_gpu:
            torch.cuda.synchronize()


@dataclass(slots=True)
class Results:
    """The figures of a section.

    Args:
        path: Written after each figure.
        facts: What :mod:`docs/generate.py` wants to know: benchmark, command, card, commit and so on.
    """

    path: Path
    facts: dict[str, Any]
    figures: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def figure(self, name: str, text: str) -> None:
        """Add a figure, with its unit."""
        print(f"  {name}: {text}", flush=True)
        self.figures[name] = text
        self.write("cut short")

    def check(self, name: str, holds: bool, text: str) -> None:
        """Add a figure that must hold; the section fails if it does not, after its other figures."""
        if not holds:
            self.failed.append(name)
            text = f"**fails**: {text}"
        self.figure(name, text)

    def skip(self, name: str, why: str) -> None:
        """Say that a figure was not measured; it is not written."""
        print(f"  {name}: skipped, {why}", flush=True)

    def write(self, ended: str) -> None:
        """Write the file: complete, or not at all."""
        content = {**self.facts, "figures": self.figures, "failed": self.failed, "ended": ended}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n")
        new.replace(self.path)


def path_of(folder: Path, device: str, section: str) -> Path:
    """Return the file of a section. Only those of a GPU have the names that the page of results is made of."""
    return folder / f"{'gpu' if device == 'cuda' else 'cpu'}-{section}.json"


def facts_of(title: str, device: str, commit: str) -> dict[str, Any]:
    """Return what a figure belongs to: the card, the driver, the version of torch, the commit, the day."""
    is_gpu = device == "cuda"
    return {
        "benchmark": title,
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "card": torch.cuda.get_device_name() if is_gpu else "none, on the CPU",
        "cards": torch.cuda.device_count() if is_gpu else 0,
        "driver": driver() if is_gpu else "none",
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def driver() -> str:
    """Return the version of the driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown, there is no nvidia-smi"
    asked = subprocess.run(
        [smi, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return asked.stdout.split("\n")[0].strip() or f"unknown, nvidia-smi ended with {asked.returncode}"


def commit_of() -> tuple[str, bool]:
    """Return the commit of this checkout, "" if there is none, and whether files differ from it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = [line for line in git("status", "--porcelain").splitlines() if not line.endswith(".json")]
    return git("rev-parse", "HEAD"), bool(changed)
