"""One job of the study of parallelism: a network trained by real processes, some of which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast_lab.workloads import load_dataset

SCRIPTS = Path(__file__).with_name("workers")
"""Scripts that the workers run."""

REPLICATED, PIPELINE, SHARDED, HYBRID = KINDS = ("replicated", "pipeline", "sharded", "hybrid")
"""How the model is divided; hybrid: two pipelines that are replicas of each other."""
CHAINS = 2
"""Pipelines of a hybrid job."""

ROLLBACK, FORWARD, RESTART, REINIT = STRATEGIES = ("rollback", "forward", "restart", "reinit")
PARTIAL = "partial"
"""The strategy that only split models have."""

BACKUPS = ("--mirror-every", "16", "--mirror-fraction", "0.125")
"""Standby settings under :data:`PARTIAL`: an eighth of a part every other iteration."""

ONE_BUCKET_BYTES = 1 << 40
"""All gradients in one all-reduce, as in the code of 2017."""

_OWN = ("HOLDFAST_", "OMPI_", "PMIX_", "PRTE_")
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingScale:
    """The size of a training.

    Args:
        dataset: Name of the dataset.
        side: Height and width to which images are scaled; None: unscaled.
        samples: Number of training samples, a multiple of ``batch``.
        batch: Mini-batch of all workers together.
        epochs: Passes over the samples.
        slices: Slices of a mini-batch; ``batch`` is a multiple of it.
        kills: The iterations in which a worker is killed.
        checkpoint_every: Iterations between checkpoints, where there are checkpoints.
    """

    dataset: str
    side: int | None
    samples: int
    batch: int
    epochs: int
    slices: int
    kills: tuple[int, ...]
    checkpoint_every: int

    @property
    def steps(self) -> int:
        """Iterations of a whole run."""
        return self.epochs * self.samples // self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismRun:
    """The settings of one run.

    Args:
        kind: One of :data:`KINDS`.
        strategy: One of :data:`STRATEGIES`.
        network: Name of the network.
        workers: Number of active workers.
        scale: The size of the training.
        kills: Rank and iteration of each kill.
        spares: Hot spares that replace failed workers.
        mirror: Standby copies of each part on other workers; None: Holdfast's default.
        checkpoints: Whether checkpoints are written.
        blocks: Whether each worker holds contiguous blocks of the data, read from a file.
        seed: Seed of everything random.
        reinit_from: What ``reinit`` restores from.
        options: Further options of ``holdfast run``.
        arguments: Further arguments of the workers' script.
    """

    kind: str
    strategy: str
    network: str
    workers: int
    scale: TrainingScale
    kills: tuple[tuple[int, int], ...] = ()
    spares: int = 0
    mirror: int | None = None
    checkpoints: bool = False
    blocks: bool = False
    seed: int = 0
    reinit_from: str = ""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Number of stages or shards of the model."""
        return {REPLICATED: 1, HYBRID: self.workers // CHAINS}.get(self.kind, self.workers)

    @property
    def form(self) -> str:
        """Whether failed workers are replaced, as text."""
        return "replaced" if self.spares else "survivors only"

    def about(self) -> dict[str, Any]:
        """Return the columns that describe the run."""
        rank, step = self.kills[0] if self.kills else (None, None)
        return {
            "kind": self.kind,
            "strategy": self.strategy,
            "from": self.reinit_from or ("checkpoint" if self.checkpoints else None),
            "network": self.network,
            "workers": self.workers,
            "parts": self.parts,
            "form": self.form,
            "mirror": self.mirror,
            "kill_rank": rank,
            "kill_step": step,
            "kills": len(self.kills),
        }

    def words(self, folder: Path) -> list[str]:
        """Return the command line after ``holdfast run``."""
        words = ["-n", self.workers, "--strategy", self.strategy, "--slices", self.scale.slices, "--seed", self.seed]
        words += ["--no-page", "--report", folder / "report", "--spares", self.spares]
        words += [] if self.mirror is None else ["--mirror", self.mirror]
        words += ["--reinit-from", self.reinit_from] if self.reinit_from else []
        if self.checkpoints:
            words += ["--checkpoint-dir", folder / "saved", "--checkpoint-every", self.scale.checkpoint_every]
        if self.strategy == FORWARD:
            words += ["--rescale", "original"]
        words += self.options
        for rank, step in self.kills:
            words += ["--inject", f"kill:rank={rank},step={step}"]
        return [*map(str, words), *self._script(folder)]

    def _script(self, folder: Path) -> list[str]:
        scale = self.scale
        words = [SCRIPTS / "parallel.py", PIPELINE if self.kind == HYBRID else self.kind, "--network", self.network]
        words += ["--data", folder / "data", "--notes", folder / "notes", "--parts", self.parts]
        words += ["--samples", scale.samples, "--batch", scale.batch, "--epochs", scale.epochs]
        words += ["--blocks", scale.slices] if self.blocks else []
        words += ["--bucket-bytes", ONE_BUCKET_BYTES] if self.strategy == FORWARD else []
        words += self.arguments
        return [str(word) for word in words]

    def environment(self) -> dict[str, str]:
        """Return the environment of the workers, without the variables of any other job."""
        return own_environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismOutcome:
    """The results of a run.

    Args:
        report: ``report.json``, empty if there is none.
        events: The records.
        notes: The notes of each worker that ended.
        files: Number of files that the job wrote besides its report and notes.
        failed: Why it failed, in a line; "" if it succeeded.
        code: Its exit code; negative for the signal that killed it.
    """

    report: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    files: int = 0
    failed: str = ""
    code: int = 0

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.events if record["event"] == event]


def own_environment() -> dict[str, str]:
    """Return the environment of a job's processes: no variables of another job, one thread, no accelerator."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    return own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def write_data(folder: Path, scale: TrainingScale, data: Path | None) -> None:
    """Write the samples as four arrays that workers read in pieces."""
    folder.mkdir(parents=True)
    dataset = load_dataset(scale.dataset, data, limit=scale.samples, size=scale.side)
    for prefix, part in (("", dataset.train), ("test-", dataset.test)):
        for name, tensor in zip("xy", part[:], strict=True):
            assert isinstance(tensor, torch.Tensor)
            np.save(folder / f"{prefix}{name}.npy", tensor.numpy())


def carry_out(job: ParallelismRun, data: Path | None, timeout_s: float) -> ParallelismOutcome:
    """Run a job and return its results.

    Args:
        job: The job.
        data: Directory of the datasets that are read from files.
        timeout_s: The job is ended after this many seconds, and has failed.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-study-") as name:
        folder = Path(name)
        write_data(folder / "data", job.scale, data)
        (folder / "notes").mkdir()
        words = [sys.executable, "-m", "holdfast", "run", *job.words(folder)]
        code, said = ended(words, job.environment(), folder, timeout_s)
        return _read(folder, "" if code == 0 else f"ended with exit code {code}: {said}", code)


def ended(words: Sequence[str], env: dict[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Run a command to its end in ``folder/here``; return its exit code and its last line of output."""
    output, here = folder / "said", folder / "here"
    here.mkdir()
    with output.open("wb") as said:
        process = subprocess.Popen(
            words,
            env=env,
            cwd=here,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"was not done after {timeout_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # safe: the process group is the command's own session
            process.wait()
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return code, (lines or ["no output"])[-1][:_LAST_WORDS]


def _read(folder: Path, failed: str, code: int) -> ParallelismOutcome:
    report, events = folder / "report" / "report.json", folder / "report" / "events.jsonl"
    if not report.is_file():
        return ParallelismOutcome(failed=failed or "it wrote no report", code=code)
    return ParallelismOutcome(
        report=json.loads(report.read_text()),
        events=[json.loads(line) for line in events.read_text().splitlines()],
        notes=[json.loads(path.read_text()) for path in sorted((folder / "notes").glob("notes-*.json"))],
        files=sum(path.is_file() for place in ("here", "saved") for path in (folder / place).rglob("*")),
        failed=failed,
        code=code,
    )
