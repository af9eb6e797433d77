"""Several processes on one GPU, gradients all-reduced in host memory, workers killed in every phase: bits and recovery.

The undisturbed run of two workers is what every run with kills is compared with, whatever its number of workers: the
slices are the same.
"""

from __future__ import annotations

import statistics

from gpus.jobs import Job, killed, state_of, whole
from gpus.results import Results, Where

PHASES = ("forward", "backward", "allreduce", "optimizer")
KILLS = {
    2: [(f"kill:rank=1,step=4,phase={phase}",) for phase in PHASES],
    4: [("kill:rank=1,step=3,phase=forward", "kill:rank=2,step=5,phase=backward", "kill:rank=3,step=7,phase=allreduce")],
    8: [
        (
            "kill:rank=1,step=2,phase=backward", "kill:rank=2,step=4,phase=allreduce",
            "kill:rank=3,step=4,phase=recovery", "kill:rank=4,step=6,phase=optimizer", "kill:rank=0,step=8,phase=forward",
        )
    ],
}  # fmt: skip
"""For a number of workers, the kills of each job."""
NEXT_COMMIT_MS = 500.0
"""Kill to next commit takes at most so long."""


def run(where: Where, results: Results) -> None:
    """Compare, and time the recoveries."""
    recoveries: list[dict[str, float]] = []
    for model in ("cnn",) if where.tiny else ("mlp", "cnn", "transformer"):
        undisturbed = state_of(Job(where, model, 2).run())
        results.check(f"{model}, undisturbed", bool(undisturbed), "replicas equal")
        for workers in (2,) if where.tiny else KILLS:
            of_phases = KILLS[workers] if workers > 2 or model == "cnn" else KILLS[workers][:1]
            for kills in of_phases[-1:] if where.tiny else of_phases:
                recoveries += one(where, results, model, workers, kills, undisturbed)
    seen = statistics.median(failure["detect_s"] for failure in recoveries)
    median, most = (1e3 * take(failure["recover_s"] for failure in recoveries) for take in (statistics.median, max))
    text = (
        f"median {median:.0f} ms ({1e3 * seen:.0f} until it is seen), longest {most:.0f} ms, of {len(recoveries)} kills"
    )
    results.check("kill to next commit", median < NEXT_COMMIT_MS or not where.is_gpu, text)


def one(
    where: Where, results: Results, model: str, workers: int, kills: tuple[str, ...], undisturbed: str
) -> list[dict[str, float]]:
    """Run a job with kills; return its failures with the times from each kill to its notice and to the next commit."""
    report = Job(where, model, workers, faults=kills).run()
    victims = sorted(int(kill.split("rank=")[1].split(",")[0]) for kill in kills)
    phases = ", ".join(kill.split("phase=")[1] for kill in kills)
    landed = killed(report) == victims
    equal = state_of(report) == undisturbed and whole(report)
    text = "the bits of the undisturbed run" if equal else "other bits, or lost samples"
    text = text if landed else f"{text}; killed were {killed(report)} instead of {victims}"
    results.check(f"{model}, {workers} workers, killed in {phases}", landed and equal, text)
    return [failure for failure in report["failures"] if failure["recover_s"] is not None]
