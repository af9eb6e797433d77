"""Iteration cost of a run against the undisturbed one, from the losses of the steps that both committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.records.files import complete_lines, read_event_files
from holdfast.records.paths import events_path
from holdfast.summary.files import check_keys
from holdfast.tools.iteration_cost import iteration_cost, levels

WINDOWS = (8, 16, 32, 64)
"""Window lengths for the mean loss, in steps; the first is used with which the loss falls by more than noise."""
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a file that another program wrote may raise."""
_ALIKE = ("seed", "slices", "steps_planned", "parameters")


def read_losses(directory: Path, metric: str = "loss") -> tuple[dict[str, Any], list[float]]:
    """Return the report of a run, and the loss of each committed step, in order; of a recomputed step the last.

    Args:
        directory: The folder given to ``holdfast run --report``.
        metric: The name under which the loss was logged.

    Raises:
        ConfigError: if the folder holds no report, or the script did not log this metric.
    """
    try:
        report = json.loads(_text_of(directory / "report.json"))
        check_keys(report, {"failures": list, **dict.fromkeys(_ALIKE, object)}, "report.json")
        lines = read_event_files(directory, complete_lines) or _text_of(events_path(directory)).splitlines()
        events = [json.loads(line) for line in lines]
        values = {event["step"]: event["metrics"].get(metric) for event in events if event["event"] == "StepCommitted"}
        losses = [values[step] for step in sorted(values)]
    except (OSError, ConfigError, *_MALFORMED) as error:
        why = f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(
            f"{directory} must hold report.json and events.jsonl of a run (holdfast run --report {directory}): {why}"
        ) from error
    if not losses or not all(type(loss) in (int, float) for loss in losses):
        raise ConfigError(
            f"the run in {directory} must have logged {metric} in every step, to be compared: step.log({metric}=...)"
        )
    return report, losses


def _text_of(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path.name} is no file")  # a pipe would be waited for without end
    return path.read_text()


def cost_against(
    directory: Path, undisturbed: Path, metric: str = "loss", windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """Return how many more steps a run took than the undisturbed one to reach the same losses.

    Args:
        directory: The report of the run.
        undisturbed: The report of the run with the same seed and without failures.
        metric: The name under which the loss was logged.
        windows: Permitted lengths of the window for the mean loss, in steps.

    Returns:
        ``iterations``, the mean over levels of the loss that the undisturbed run reaches after the step of the first
        failure (earlier levels cost nothing), null if the loss does not fall there by more than noise; ``levels``;
        ``censored``, how many of them the run never reached; ``window``, the steps that the loss was averaged over.

    Raises:
        ConfigError: if the two cannot be compared.
    """
    report, losses = read_losses(directory, metric)
    base, wanted = read_losses(undisturbed, metric)
    for name in _ALIKE:
        if report[name] != base[name]:
            raise ConfigError(
                f"the run in {undisturbed} has {name} {base[name]}, this one {report[name]}: compare runs of the same job"
            )
    struck = min((failure["step"] for failure in report["failures"] if failure["step"] is not None), default=0)
    about: dict[str, Any] = {"undisturbed": str(undisturbed), "iterations": None, "levels": [], "censored": 0}
    for window in windows:
        try:
            loss_levels = levels(wanted, window, begin=struck)
        except ConfigError:
            continue
        cost = iteration_cost(losses, wanted, loss_levels, window)
        mean = round(cost.iterations, 3)
        return about | {"iterations": mean, "levels": loss_levels, "censored": cost.censored, "window": window}
    return about | {"window": None}
