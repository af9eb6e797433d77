"""The time of a step beside that of the plain loop, for models of several sizes."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from gpus.jobs import TRAIN, Job, ended_in_all
from gpus.results import Results, Where

SIZES = {"350M": 30, "25M": 60, "cnn": 400, "1B": 12}
"""Steps of a run; the model that a promise is made of comes first."""
MOST = 1.02
"""A step of the model of 350 M parameters takes at most so many times that of the plain loop, with one worker."""
ROUNDS = 3


def run(where: Where, results: Results) -> None:
    """Measure in turns: plain, virtual, one worker over gloo, and two of each."""
    for model, steps in {"cnn": 12}.items() if where.tiny else SIZES.items():
        words = ("--steps", steps, "--batch", 16, "--slices", 1)
        took: dict[str, list[float]] = {"plain": [], "virtual": [], "gloo": []}
        for number in range(1 if where.tiny else ROUNDS):
            took["plain"].append(plain(where, model, words, 1))
            for fabric in ("virtual", "gloo"):
                took[fabric].append(with_session(where, model, words, 1, fabric))
            compare(where, results, model, took, is_last=where.tiny or number == ROUNDS - 1)
        if not where.tiny and model != "1B":
            two(where, results, model, steps)


def compare(where: Where, results: Results, model: str, took: dict[str, list[float]], *, is_last: bool) -> None:
    """Say what was found so far, so that a run that is cut short has it; judge after the last round."""
    base = statistics.median(took["plain"])
    for name in ("virtual", "gloo"):
        ratio, rounds = statistics.median(took[name]) / base, len(took[name])
        text = f"{ratio:.3f} of a plain loop, {base:.2f} ms, {rounds} round{'s' * (rounds > 1)}"
        must = where.is_gpu and model == "350M" and is_last
        results.check(f"{model}, 1 worker, {name}", ratio <= MOST or not must, text)


def two(where: Where, results: Results, model: str, steps: int) -> None:
    """Two workers share the GPU, beside two plain loops that share it and exchange nothing."""
    base = plain(where, model, ("--steps", steps, "--batch", 8, "--slices", 1), 2)
    ours = with_session(where, model, ("--steps", steps, "--batch", 16, "--slices", 2), 2, "gloo")
    results.figure(f"{model}, 2 workers on one GPU, gloo", f"{ours / base:.3f} of two plain loops, {base:.2f} ms")


def with_session(where: Where, model: str, words: tuple[Any, ...], workers: int, fabric: str) -> float:
    """Return the time of a step, ms."""
    return float(Job(where, model, workers, words=words, fabric=fabric).run()["metrics"]["step_ms"])


def plain(where: Where, model: str, words: tuple[Any, ...], processes: int) -> float:
    """Return the time of a step of the plain loop, ms; the slower one of two that share the GPU."""
    command = [sys.executable, *map(str, (TRAIN, model, "--device", where.device, "--plain", *words))]
    return max(float(json.loads(said)["step_ms"]) for said in ended_in_all([(command, {})] * processes))
