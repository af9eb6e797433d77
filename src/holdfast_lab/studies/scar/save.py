"""Cost of a partial save: its blocking time compared with a plain copy, and the time to choose blocks.

An MLP of 8.5 million parameters on one of two workers, the smallest number that can lose a part. The worker computes
with the whole model, and owns and updates the larger of two shards, in blocks of 16 numbers, none of which spans two
layers. In each repetition all fractions take turns, in a different order each time. A training step precedes each
measurement, so that caches are in the state in which training leaves them. A step excludes its all-reduces.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import Sharded
from holdfast.checkpoint.priority import PriorityPolicy, RunningCheckpoint
from holdfast_lab.studies.base import MEASURED, Claim, Row, Task, statement
from holdfast_lab.studies.pool import WorkerPool
from holdfast_lab.studies.sections import Section, measured, milliseconds, number, table
from holdfast_lab.studies.stats import bootstrap, median

HELD_TIMES, SELECTED_PERCENT = 1.2, 5.0
"""Requirements: at most so many times a copy, and at most so many percent of a step."""
_ASKED = "requirement on a partial save"
_WIDTHS = (784, 2048, 2048, 1312, 10)
_SHARDS = 2
_SAMPLES, _BATCHES = 32, 32
_BLOCK = 16
_EVERY = 16
_REPETITIONS = 30
_SAVINGS = {
    f"r = 1/{parts}" if parts > 1 else "r = 1": PriorityPolicy(every=_EVERY, fraction=1 / parts) for parts in (1, 4, 8)
}
_PARTS = ("step_s", "selection_s", "write_s", "copy_s")

Times = dict[str, list[float]]


class _Timed(RunningCheckpoint):
    """A priority checkpoint that measures its time for writing."""

    write_s = 0.0

    def _encode(self, *arguments: Any, **more: Any) -> Any:
        begun_s = time.perf_counter()
        written = super()._encode(*arguments, **more)
        self.write_s += time.perf_counter() - begun_s
        return written


class _Training:
    """The MLP, trained with momentum; the parameters of the larger shard are views of one tensor of blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(*widths) for widths in itertools.pairwise(_WIDTHS)]
        self._model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]
        named = dict(self._model.named_parameters())
        shards = [[named[name] for name in names] for names in Sharded(self._model).shard_names(_SHARDS)]
        held = max(shards, key=_numel)
        self.parameters = _numel(held)
        self.rows = _gathered(held)
        self._optimizer = torch.optim.SGD(held, lr=0.01, momentum=0.9)
        self._batches = self._drawn()
        self.step = 0

    def _drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, classes = torch.rand(_BATCHES, _SAMPLES, _WIDTHS[0]), torch.randint(_WIDTHS[-1], (_BATCHES, _SAMPLES))
        while True:
            yield from zip(images, classes, strict=True)

    def train(self) -> None:
        """Train one step."""
        x, y = next(self._batches)
        self._model.zero_grad()
        nn.functional.cross_entropy(self._model(x), y).backward()
        self._optimizer.step()
        self.step += 1


def _numel(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _gathered(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a tensor of blocks, and make the parameters views of it."""
    blocks = [-(-parameter.numel() // _BLOCK) for parameter in parameters]
    rows = torch.zeros(sum(blocks), _BLOCK)
    for parameter, mine in zip(parameters, rows.split(blocks), strict=True):
        place = mine.view(-1)[: parameter.numel()].view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
    return rows


def held_rows(seed: int) -> list[Row]:
    """Return a row for each fraction r: median times of a save, and their ratios with 95 % intervals.

    Args:
        seed: Seed of the order of the turns, and of the resampling.
    """
    training = _Training()
    savings = {way: _Timed([training.rows], saving) for way, saving in _SAVINGS.items()}
    times: dict[str, Times] = {way: {part: [] for part in _PARTS} for way in savings}
    for turn in range(-1, _REPETITIONS):  # the first repetition is a warm-up
        for way in random.Random(f"{seed} {turn}").sample(sorted(savings), len(savings)):
            taken = _one(training, savings[way])
            if turn >= 0:
                for part, taken_s in zip(_PARTS, taken, strict=True):
                    times[way][part].append(taken_s)
    return [_row(way, training.parameters, found, seed) for way, found in times.items()]


def _one(training: _Training, running: _Timed) -> tuple[float, ...]:
    """Save once; return the seconds of each of :data:`_PARTS`."""
    step_s = _seconds(training.train)
    running.write_s, begun_s = 0.0, time.perf_counter()
    saved = running.take([training.rows], training.step)
    take_s = time.perf_counter() - begun_s
    running.put(saved)
    training.train()
    copy_s = _seconds(lambda: training.rows.index_select(0, saved.blocks))
    return step_s, take_s - running.write_s, running.write_s, copy_s


def _seconds(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def _row(way: str, parameters: int, found: Times, seed: int) -> Row:
    found = found | {"held_s": [sum(both) for both in zip(found["selection_s"], found["write_s"], strict=True)]}
    saves = 1 / _SAVINGS[way].period  # average number per step
    row: Row = {"part": "held", "status": MEASURED, "way": way, "parameters": parameters, "repetitions": _REPETITIONS}
    row |= {part: median(values) for part, values in found.items()}
    return (
        row
        | _ratio("write_to_copy", found["write_s"], found["copy_s"], seed)
        | _ratio("held_to_copy", found["held_s"], found["copy_s"], seed)
        | _ratio("selection_percent", found["selection_s"], found["step_s"], seed, 100 * saves)
    )


def _ratio(name: str, mine: Sequence[float], theirs: Sequence[float], seed: int, times: float = 1.0) -> Row:
    """Return the ratio of the medians and its interval, by bootstrap over the repetitions."""

    def of(drawn: Sequence[Sequence[float]]) -> float:
        chosen = [int(number) for number in drawn[0]]
        return times * median([mine[number] for number in chosen]) / median([theirs[number] for number in chosen])

    every = [float(number) for number in range(len(mine))]
    low, high = bootstrap([every], of, seed)
    return {name: of([every]), f"{name}_low": low, f"{name}_high": high}


def held_tasks(workers: WorkerPool, seed: int) -> list[Task]:
    """Return the timing task, which runs alone in one of the processes."""
    return [Task("held: the larger shard of two", partial(_task, workers, seed))]


def _task(workers: WorkerPool, seed: int, _: Sequence[Row]) -> list[Row]:
    return workers.rows(held_rows, [seed])


# -- claims and table


def held_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims about the requirements, decided by the intervals."""
    held = [row for row in rows if row["part"] == "held" and row["status"] == MEASURED]
    words = (
        f"A partial save blocks the loop for at most {HELD_TIMES:g} times as long as a plain copy of the same blocks, "
        "excluding the choice of blocks"
    )
    with_choice = "including the choice " + ", ".join(f"{row['held_to_copy']:.2g} times ({row['way']})" for row in held)
    return [
        _at_most(words, held, "write_to_copy", HELD_TIMES, "times the copy", with_choice),
        _at_most(
            f"Choosing the blocks takes less than {SELECTED_PERCENT:g} % of a step, averaged over all steps: 8.5 "
            "million parameters, two workers",
            held,
            "selection_percent",
            SELECTED_PERCENT,
            "%",
            f"one pass over the {held[0]['parameters']:,} owned parameters and their last saved values" if held else "",
        ),
    ]


def _at_most(words: str, rows: Sequence[Row], name: str, most: float, unit: str, more: str) -> Claim:
    """Return a claim that a number is at most ``most`` at every r; undecided if an interval contains ``most``."""
    if not rows:
        return statement(words, _ASKED, most, unit)
    worst = max(rows, key=lambda row: float(row[name]))
    holds = True if all(row[f"{name}_high"] <= most for row in rows) else None
    holds = False if any(row[f"{name}_low"] > most for row in rows) else holds
    each = "; ".join(
        f"{row['way']} {row[name]:.3g} [{row[f'{name}_low']:.3g}, {row[f'{name}_high']:.3g}]" for row in rows
    )
    return statement(words, _ASKED, most).judged(
        worst[name],
        holds,
        f"the largest: {worst['way']}; {each} {unit}; {more}",
        ci=(worst[f"{name}_low"], worst[f"{name}_high"]),
        unit=unit,
    )


def held_table() -> Section:
    """Return the table of the page."""
    return table(
        "held",
        "Cost of a partial save",
        f"The larger of two shards of 8.5 million parameters, in blocks of {_BLOCK} numbers, C = {_EVERY}, medians of "
        f"{_REPETITIONS} repetitions in one thread. Selection: choosing the blocks. Write: encoding the chosen blocks; "
        "both block the training loop. Copy: a plain torch copy of the same blocks. At r = 1/8 every second step "
        "saves. On a busy machine only the ratios are meaningful.",
        where=measured("held"),
        by=["way"],
        columns=[
            number("parameters", "owned parameters"),
            milliseconds("step_s", "step"),
            milliseconds("selection_s", "selection"),
            milliseconds("write_s", "write"),
            milliseconds("copy_s", "copy"),
            number("write_to_copy", "write", "times the copy"),
            number("held_to_copy", "selection and write", "times the copy"),
            number("selection_percent", "selection, over all steps", "% of a step"),
        ],
    )
