"""The launcher's straggler detection on measured series of step times.

    python benchmarks/stragglers.py --data DIR [--factor 2.0]

DIR holds ``job_1_norm.csv.gz`` to ``job_4_norm.csv.gz`` of the Alibaba PAI trace of 2020 (mini-batch times of each worker in
four training jobs, scaled to 0-1000; https://github.com/alibaba/clusterdata, CC BY 4.0). Each row of a file is one
mini-batch of one worker; ``time`` orders them. Here a worker's series is its step times in order, written to a beacon
as by a session, and checked after every step as by the launcher.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev

from holdfast.launch.health.stragglers import StragglerDetector
from holdfast.records.beacon import Beacon

Series = Mapping[int, Sequence[float]]
"""The step times of each worker, in any unit."""


def read_job(path: Path) -> dict[int, list[float]]:
    """Return the series of each worker of one job."""
    with gzip.open(path, "rt", newline="") as file:
        rows = sorted(
            (int(row["time"]), int(row["worker"]), float(row["batch_time_norm"])) for row in csv.DictReader(file)
        )
    series: dict[int, list[float]] = {}
    for _, worker, taken in rows:
        series.setdefault(worker, []).append(taken)
    return series


def replay(series: Series, stragglers: StragglerDetector) -> Iterator[tuple[int, dict[int, float], dict[int, float]]]:
    """Yield for every step its number, the workers first reported as stragglers in it, and all scores."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {rank: Path(folder, str(rank)) for rank in series}
        beacons = {rank: Beacon(path) for rank, path in paths.items()}
        for step in range(min(map(len, series.values()))):
            for rank, beacon in beacons.items():
                beacon.mark("forward", step)
                beacon.publish_computed(series[rank][step])
            positions = {rank: p for rank, path in paths.items() if (p := Beacon.read(path)) is not None}
            yield step, stragglers.poll(positions), stragglers.scores(positions)


def main() -> None:
    """Print a table of the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--factor", type=float, default=2.0)
    options = parser.parse_args()
    for path in sorted(options.data.glob("job_*_norm.csv.gz")):
        series = {rank: taken for rank, taken in read_job(path).items() if any(taken)}
        steps = min(map(len, series.values()))
        print(f"{path.name}: {len(series)} workers, {steps} steps")
        print("  worker  mean  noise   (standard deviation of a step over the mean)")
        for rank, taken in sorted(series.items()):
            print(f"  {rank:6}  {mean(taken):4.0f}  {stdev(taken) / mean(taken):5.2f}")
        found, highest = [], dict.fromkeys(series, 0.0)
        for step, stragglers, scores in replay(series, StragglerDetector(options.factor)):
            found += [
                f"  worker {rank} at step {step}: {score:.1f} times the other workers"
                for rank, score in stragglers.items()
            ]
            highest = {rank: max(highest[rank], scores.get(rank, 0.0)) for rank in highest}
        print(*found or ["  none"], sep="\n")
        scores_text = ", ".join(f"{rank}: {score:.2f}" for rank, score in sorted(highest.items()))
        print(f"  highest scores {scores_text}; median {median(highest.values()):.2f}")


if __name__ == "__main__":
    main()
