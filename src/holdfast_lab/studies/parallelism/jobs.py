"""One job of the study of parallelism: a network trained by real processes, some of which are killed."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast_lab.studies.processes import RealJob, run_job
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
        words += ["--spares", self.spares]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismOutcome(RealJob):
    """The results of a run.

    Args:
        notes: The notes of each worker that ended.
        files: Number of files that the job wrote besides its report and notes.
    """

    notes: list[dict[str, Any]] = field(default_factory=list)
    files: int = 0


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
        done = run_job(job.words(folder), folder, timeout_s)
        notes = [json.loads(path.read_text()) for path in sorted((folder / "notes").glob("notes-*.json"))]
        files = sum(path.is_file() for place in ("here", "saved") for path in (folder / place).rglob("*"))
        known = {name: getattr(done, name) for name in ("report", "events", "failed", "code")}
        return ParallelismOutcome(**known, notes=notes, files=files) if done.report else ParallelismOutcome(**known)
