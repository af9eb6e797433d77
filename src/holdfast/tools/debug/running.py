"""What a bundle of a running job is made from, with the positions and stacks of its workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.launch.control import RunningJob
from holdfast.launch.health.stacks import stack_from_outside
from holdfast.launch.supervise.debug_handlers import handlers_path
from holdfast.launch.supervise.processes import pairs_in
from holdfast.records.beacon import Beacon
from holdfast.records.paths import beacon_path
from holdfast.tools.debug.bundle import BundleSource
from holdfast.tools.debug.flight_recorder import flight_recorder

_AT_ONCE = 8


def live_source(job: RunningJob) -> BundleSource:
    """Return what a bundle of a running job is made from, with the positions and stacks of its workers on this machine.

    Raises:
        ConfigError: if the job has just ended.
    """
    pairs = pairs_in(job.run_dir)
    local_workers = {rank: pair.worker for rank, pair in pairs.items() if pair.is_here}
    alive = {rank: worker for rank, worker in local_workers.items() if worker.is_alive()}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        stacks = dict(zip(alive, pool.map(lambda worker: stack_from_outside(worker.pid), alive.values()), strict=True))
        traces = {rank: flight_recorder(handlers_path(job.run_dir, rank)) for rank in alive}
    live = {"positions.json": json.dumps(_positions(job.run_dir, list(pairs)), indent=1) + "\n"}
    live |= {f"stacks/rank-{rank}.txt": text for rank, text in stacks.items() if not text.startswith("(")}
    live |= {f"flight-recorder/rank-{rank}.json": text for rank, text in traces.items() if not text.startswith("(")}
    notes = [f"stack of rank {rank}: {text}" for rank, text in stacks.items() if text.startswith("(")]
    notes += [f"flight recorder of rank {rank}: {text}" for rank, text in traces.items() if text.startswith("(")]
    notes += [f"rank {rank} is on another machine" for rank in pairs if rank not in local_workers]
    return BundleSource(
        report_dir=Path(job.report_dir) if job.report_dir else None,
        run_dir=job.run_dir,
        log_dir=Path(job.log_dir) if job.log_dir else None,
        environment=_environment_of(job.pid),
        live=live,
        notes=notes,
    )


def _positions(run_dir: Path, ranks: Sequence[int]) -> dict[int, dict[str, object]]:
    positions = {rank: Beacon.read(beacon_path(run_dir, rank)) for rank in ranks}
    return {rank: asdict(position) for rank, position in positions.items() if position is not None}


def _environment_of(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError as error:
        raise ConfigError(f"job {pid} has ended in the meantime") from error
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
