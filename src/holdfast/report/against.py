"""What a run lost against the undisturbed one: its iteration cost, from the losses of the steps that both committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.report.iteration_cost import iteration_cost, levels

WINDOWS = (8, 16, 32, 64)
"""Steps that the mean of the loss is taken over; the first with which it falls by more than chance is used."""
_ALIKE = ("seed", "slices", "steps_planned", "parameters")


def read_losses(directory: Path, metric: str = "loss") -> tuple[dict[str, Any], list[float]]:
    """Return the report of a run, and the loss of each step that it committed, in order; of steps done again the last.

    Args:
        directory: What ``holdfast run --report`` was given.
        metric: What the loss is called in the log.

    Raises:
        ConfigError: if it is no such folder, or the script logged no such figure.
    """
    try:
        report = json.loads((directory / "report.json").read_text())
        events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        why = f"{Path(error.filename).name}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(
            f"{directory} must hold report.json and events.jsonl of a run (holdfast run --report {directory}): {why}"
        ) from error
    found = {event["step"]: event["metrics"].get(metric) for event in events if event["event"] == "StepCommitted"}
    losses = [found[step] for step in sorted(found)]
    if not losses or any(loss is None for loss in losses):
        raise ConfigError(
            f"the run in {directory} must have logged {metric} in every step, to be compared: step.log({metric}=...)"
        )
    return report, losses


def cost_against(
    directory: Path, undisturbed: Path, metric: str = "loss", windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """Return how many steps more a run took than the undisturbed one to come to the same losses.

    Args:
        directory: The report of the run.
        undisturbed: That of the run with the same seed, to which nothing happened.
        metric: What the loss is called in the log.
        windows: Steps that its mean may be taken over.

    Returns:
        ``iterations``, the mean over levels of the loss that the undisturbed run comes to after the step of the first
        failure (those before it cost nothing), null if the loss falls nowhere there by more than chance; ``levels``;
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
            found = levels(wanted, window, begin=struck)
        except ConfigError:
            continue
        cost = iteration_cost(losses, wanted, found, window)
        mean = round(cost.iterations, 3)
        return about | {"iterations": mean, "levels": found, "censored": cost.censored, "window": window}
    return about | {"window": None}
