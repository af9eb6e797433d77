"""``holdfast demo``: the cost of each recovery strategy, measured with real processes and real data."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.launch.job import Job, JobOutcome

KILLS = ("kill:rank=1,step=40,phase=backward", "kill:rank=2,step=90,phase=allreduce,bucket=1")
"""The second kill happens after two buckets of the step are reduced, so ``forward`` has something to keep."""

_EPOCHS = 12  # 144 steps
_BATCH_SIZE = 128
_BUCKET_BYTES = 16 << 10  # small, so that the small model has five buckets
_CHECKPOINT_EVERY = 25  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One run of the demo.

    Args:
        name: Its name in the table, and the name of its directory.
        strategy: The recovery strategy.
        faults: Fault specs, as for ``holdfast run --inject``.
        checkpoints: Whether it writes checkpoints.
    """

    name: str
    strategy: str
    faults: tuple[str, ...] = KILLS
    checkpoints: bool = False


RUNS = (
    DemoRun(name="undisturbed", strategy="rollback", faults=()),
    DemoRun(name="rollback", strategy="rollback"),
    DemoRun(name="forward", strategy="forward"),
    DemoRun(name="restart", strategy="restart", checkpoints=True),
)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the results.")] = Path("demo-out"),
    workers: Annotated[int, typer.Option(metavar="N", min=3, help="Worker processes; two of them are killed.")] = 4,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> int:
    """Train on handwritten digits: undisturbed, then under each strategy with two workers killed.

    Shows that rollback ends with the weights of the undisturbed run, bit for bit, and what each strategy
    costs. Writes DIR/results.json, DIR/index.html, and each run's report in its own directory.

    Example: holdfast demo --out demo-out --workers 4
    """
    from holdfast.observe.page.html import check_folder, write_page
    from holdfast.summary.files import write_results
    from holdfast_lab.pages.demo import demo_rows

    check_folder(out)
    reports: dict[str, Mapping[str, Any]] = {}
    for run in RUNS:
        outcome = _carry_out(run, out / run.name, workers)
        if outcome.exit_code != 0:
            return _give_up(run, outcome)
        reports[run.name] = outcome.report
    results = demo_rows(list(reports.items()), settings=_settings(workers))
    write_results(results, out)
    page = write_page(out)
    _show(results, page, as_json=as_json)
    return _judge(reports)


def _carry_out(run: DemoRun, folder: Path, workers: int) -> JobOutcome:
    from holdfast.launch.launcher import launch
    from holdfast.observe.terminal.views import make_view

    _remove_earlier_checkpoints(folder)
    print(f"-- {run.name}", file=sys.stderr)
    return launch(_job(run, folder, workers), make_view(sys.stderr))


def _remove_earlier_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of an earlier demo, recognised by the report beside them.

    Other directories are not touched.
    """
    if (folder / "report.json").is_file():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _job(run: DemoRun, folder: Path, workers: int) -> Job:
    from holdfast.config import Settings
    from holdfast.faults.plan import FaultPlan, parse
    from holdfast.launch.job import Job

    # Not from the environment, so that the demo has the same result everywhere.
    settings = Settings(
        fabric="ulfm",
        workers=workers,
        strategy=run.strategy,
        faults=FaultPlan(tuple(map(parse, run.faults))).to_json() if run.faults else "",
        checkpoint_dir=str(folder / "checkpoints") if run.checkpoints else "",
        checkpoint_every=_CHECKPOINT_EVERY if run.checkpoints else 0,
    )
    options = {"--epochs": _EPOCHS, "--batch-size": _BATCH_SIZE, "--bucket-bytes": _BUCKET_BYTES}
    args = tuple(str(word) for option in options.items() for word in option)
    return Job(script=_script(), args=args, settings=settings, report_dir=folder)


def _script() -> Path:
    """Return the file of the workload, without importing it and thus torch."""
    package = importlib.util.find_spec("holdfast_lab")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("workloads") / "train.py"


def _settings(workers: int) -> dict[str, Any]:
    return {
        "dataset": "scikit-learn's digits: 1497 training and 300 test images",
        "model": "CNN with batch norm and dropout",
        "optimizer": "SGD with momentum",
        "workers": workers,
        "batch size": _BATCH_SIZE,
        "epochs": _EPOCHS,
        "steps between checkpoints (restart)": _CHECKPOINT_EVERY,
        "killed": "; ".join(KILLS),
    }


def _give_up(run: DemoRun, outcome: JobOutcome) -> int:
    print(f"error: the run {run.name} failed: {outcome.message}", file=sys.stderr)
    if outcome.traceback:
        print(outcome.traceback.rstrip(), file=sys.stderr)
    return outcome.exit_code


def _show(results: Mapping[str, Any], page: Path, *, as_json: bool) -> None:
    from rich.console import Console

    from holdfast_lab.pages.demo import demo_table

    if as_json:
        print(json.dumps(results, indent=1))
    else:
        # A pipe has no width, so the table would be cut at 80 columns.
        Console(width=None if sys.stdout.isatty() else 160).print(demo_table(results))
    print(f"page: {page}", file=sys.stderr)


def _judge(reports: Mapping[str, Mapping[str, Any]]) -> int:
    """Print whether the demo behaved as expected, and return the exit code."""
    complaint = _complaint(reports)
    if complaint:
        print(f"error: {complaint}", file=sys.stderr)
        return 1
    print("rollback ended with the sha256 of the undisturbed run: the weights are bit-identical", file=sys.stderr)
    return 0


def _complaint(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what is wrong with the runs; "" if nothing is."""
    for run in RUNS:
        report = reports[run.name]
        if report["faults_not_fired"] or len(report["failures"]) < len(run.faults):
            return f"the run {run.name} must lose {len(run.faults)} workers, lost {len(report['failures'])}"
    ours, reference = (reports[name]["replicas"]["sha256"] for name in ("rollback", "undisturbed"))
    return "" if ours == reference else f"rollback ended with sha256 {ours}, the undisturbed run with {reference}"
