"""Paths of the files in a run folder."""

from __future__ import annotations

from pathlib import Path


def records_path(run_dir: Path, writer: str) -> Path:
    """Return the path of the records of ``writer`` (a rank, or ``"launcher"``)."""
    return run_dir / f"records-{writer}.jsonl"


def events_path(report_dir: Path, number: int = 0) -> Path:
    """Return the file of the newest records in a report directory; from 1 on, that of full files, oldest first."""
    return report_dir / (f"events-{number:06d}.jsonl" if number else "events.jsonl")


def event_files(report_dir: Path) -> list[Path]:
    """Return the files of the records in a report directory, oldest first; none if it has none."""
    files = {int(path.stem[7:]): path for path in report_dir.glob("events-*.jsonl") if path.stem[7:].isdecimal()}
    in_order = [*(files[number] for number in sorted(files)), events_path(report_dir)]
    return [path for path in in_order if path.is_file()]


def beacon_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the beacon of ``rank``."""
    return run_dir / f"beacon-{rank}"


def stop_path(run_dir: Path) -> Path:
    """Return the file that exists once the whole job was asked to stop, and not only a worker that receives SIGTERM."""
    return run_dir / "stop"


def launcher_lost_path(run_dir: Path) -> Path:
    """Return the file that exists once the launcher has died, which stops the whole job."""
    return run_dir / "gone"


def media_dir(run_dir: Path) -> Path:
    """Return the folder of images that the script logs; it exists if this launcher logs to something that shows them."""
    return run_dir / "media"


def media_elsewhere_path(run_dir: Path) -> Path:
    """Return the file that exists if the launcher of another node does: it gets records, and no files."""
    return run_dir / "media-elsewhere"


def strike_path(run_dir: Path, fault: int) -> Path:
    """Return the file with which a worker asks the launcher for a node fault; ``fault`` is its number in the plan.

    The file holds the step in progress. The launcher removes it after the fault has struck.
    """
    return run_dir / f"strike-{fault}"


def requests_path(run_dir: Path) -> Path:
    """Return the file whose lines request changes to the running job: JSON objects, see ``engine/live_config.py``."""
    return run_dir / "requests.jsonl"
