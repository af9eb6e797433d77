"""The peak of device memory beside the table: 4 bytes for a parameter, 8 for Adam, 4 for each slice held, 4 for a result."""

from __future__ import annotations

from gpus.jobs import Job, killed
from gpus.results import Results, Where

MODEL = "wide"
"""Its activations take no memory."""
MARGIN = 1.05


def run(where: Where, results: Results) -> None:
    """Compare for several numbers of slices, and after a loss."""
    words = ("--steps", 8, "--batch", 8, "--features", "fused")
    for slices in (1, 2, 8):
        report = Job(where, MODEL, 1, words=(*words, "--slices", slices)).run()
        compare(results, f"{slices} slices, 1 worker", report, slices)
    report = Job(where, MODEL, 2, words=(*words, "--slices", 2), faults=("kill:rank=1,step=4",)).run()
    results.check("2 slices, 2 workers: the kill", killed(report) == [1], f"ended by SIGKILL: {killed(report)}")
    compare(results, "2 slices, after the loss of one of 2 workers", report, 2)


def compare(results: Results, name: str, report: dict[str, object], held: int) -> None:
    """Compare the peak with the table, for a worker that holds a number of slices."""
    metrics, parameters = report["metrics"], report["parameters"]
    assert isinstance(metrics, dict)
    assert isinstance(parameters, int)
    each, expected = metrics["peak_bytes"] / parameters, 12.0 + 4 * held + 4
    results.check(name, each <= MARGIN * expected, f"{each:.1f} bytes a parameter, at most {expected:.0f} expected")
