"""Where the files of a run lie in its run folder."""

from __future__ import annotations

from pathlib import Path


def records_path(run_dir: Path, writer: str) -> Path:
    """Return where ``writer`` (a rank, ``"launcher"``) writes its records."""
    return run_dir / f"records-{writer}.jsonl"


def beacon_path(run_dir: Path, rank: int) -> Path:
    """Return where ``rank`` keeps its beacon."""
    return run_dir / f"beacon-{rank}"


def stop_path(run_dir: Path) -> Path:
    """Return the file that is there when the whole job was told to stop, not only the worker that is sent a SIGTERM."""
    return run_dir / "stop"


def gone_path(run_dir: Path) -> Path:
    """Return the file that is there when the launcher is gone, and the whole job stops for that."""
    return run_dir / "gone"


def strike_path(run_dir: Path, fault: int) -> Path:
    """Return the file in which a worker asks the launcher for a fault that strikes the node; its number is in the plan.

    It holds the step in progress. The launcher removes it when it has struck.
    """
    return run_dir / f"strike-{fault}"


def requests_path(run_dir: Path) -> Path:
    """Return the file whose lines ask for changes to the running job: JSON objects, see ``engine/live_config.py``."""
    return run_dir / "requests.jsonl"
