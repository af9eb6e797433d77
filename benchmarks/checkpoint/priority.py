"""How long a partial save of the priority checkpoint blocks the training loop: 8.5 million parameters, float32.

    python benchmarks/checkpoint/priority.py [--repetitions 30] [--json FILE]

=============  ======================================================================================================
column         what it is
=============  ======================================================================================================
step           a step of the MLP: 32 samples, SGD with momentum, one thread
selection      from the parameters to the numbers of the blocks to save: distances, and the largest of them
write          writing these blocks; the loop is blocked for the selection and the write (``RunningCheckpoint.take``)
copy           ``index_select`` of the same blocks, the copy in plain torch
together       a copy of as many contiguous numbers: the lower bound for any choice of blocks
put            into the priority checkpoint; this can run asynchronously, as in the peer
=============  ======================================================================================================

The parameters are divided into blocks of 16 numbers, none across two layers. In each repetition all variants take
turns, in a different order each time. Before each clock starts the MLP trains a step, so that parameters are in the
caches as after training. Ratios are ratios of medians, with 95 % intervals by bootstrap over repetitions. A save is due
every second step at r = 1/8, every sixteenth at r = 1: ``selection per step`` is the average cost in each step of
training.

The defaults take a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import cells, command_line, interval, ratio, table, take_turns, timed, write_json
from models import JOBS, loss_of, make_model, make_optimizer

from holdfast.checkpoint.priority import PriorityPolicy, RunningCheckpoint

BLOCK_NUMBERS = 16
EVERY = 16
WAYS = {
    "r = 1": PriorityPolicy(every=EVERY, fraction=1),
    "r = 1/2": PriorityPolicy(every=EVERY, fraction=1 / 2),
    "r = 1/4": PriorityPolicy(every=EVERY, fraction=1 / 4),
    "r = 1/8": PriorityPolicy(every=EVERY, fraction=1 / 8),
    "r = 1/8, line": PriorityPolicy(every=EVERY, fraction=1 / 8, predictor="line"),
    "r = 1/8, calibrated": PriorityPolicy(every=EVERY, fraction=1 / 8, predictor="calibrated"),
    "r = 1/8, int8": PriorityPolicy(every=EVERY, fraction=1 / 8, codec="int8"),
    "r = 1/8, line, int8": PriorityPolicy(every=EVERY, fraction=1 / 8, predictor="line", codec="int8"),
}
PARTS = ("step", "selection", "write", "copy", "together", "put")


class Timed(RunningCheckpoint):
    """A priority checkpoint that records how long writing took."""

    write_s = 0.0

    def _encode(self, *arguments: Any) -> Any:
        taken_s, result = with_time(lambda: super(Timed, self)._encode(*arguments))
        self.write_s += taken_s
        return result


def with_time(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds taken, and the result."""
    start_s = time.perf_counter()
    result = run()
    return time.perf_counter() - start_s, result


class Training:
    """The MLP, its parameters in one vector of blocks."""

    def __init__(self) -> None:
        job = JOBS["mlp"]
        self.model = make_model("mlp")
        self.rows = self._gather()
        self._optimizer = make_optimizer("mlp", self.model)
        self._batches = self._draw(job.data(32 * job.samples, None), job.samples)
        self.step = 0

    def _gather(self) -> torch.Tensor:
        parameters = list(self.model.parameters())
        blocks = [-(-parameter.numel() // BLOCK_NUMBERS) for parameter in parameters]
        rows = torch.zeros(sum(blocks), BLOCK_NUMBERS)
        for parameter, mine in zip(parameters, rows.split(blocks), strict=True):
            place = mine.view(-1)[: parameter.numel()].view(parameter.shape)
            parameter.data = place.copy_(parameter.data)
        return rows

    def _draw(self, dataset: Any, samples: int) -> Iterator[Any]:
        while True:
            for begin in range(0, len(dataset), samples):
                yield dataset[begin : begin + samples]

    def train(self) -> None:
        """Take a step."""
        self._optimizer.zero_grad()
        loss_of(self.model, *next(self._batches)).backward()
        self._optimizer.step()
        self.step += 1


def measure(repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return how long each part took in each repetition, in milliseconds, by variant."""
    training = Training()
    running = {name: Timed([training.rows], saving) for name, saving in WAYS.items()}
    ways = {name: lambda name=name: one(training, running[name]) for name in WAYS}
    turns = take_turns(ways, repetitions)
    return {name: {part: [1e3 * each[part] for each in found] for part in PARTS} for name, found in turns.items()}


def one(training: Training, running: Timed) -> dict[str, float]:
    """Save once; return how long each part took, in seconds."""
    rows = training.rows
    step_s = timed(training.train)
    running.write_s = 0.0
    take_s, saved = with_time(lambda: running.take([rows], training.step))
    put_s = timed(lambda: running.put(saved))
    training.train()
    copy_s = timed(lambda: rows.index_select(0, saved.blocks))
    training.train()
    together_s = timed(lambda: rows[: len(saved.blocks)].clone())
    write_s = running.write_s
    return dict(zip(PARTS, (step_s, take_s - write_s, write_s, copy_s, together_s, put_s), strict=True))


def show(times: dict[str, dict[str, list[float]]]) -> str:
    """Return the tables."""
    parts, ratios = [], []
    for name, found in times.items():
        around = (cells(found[part]) for part in PARTS)
        parts.append([name, *(f"{p50} ({p10}-{p90})" for p50, p10, p90 in around)])
        ratios.append([name, *(interval(to, 3) for to in compare(name, found))])
    head = ["write / copy", "held / copy", "held / together", "selection / step", "selection per step / step"]
    return "\n\n".join(
        [
            table("A partial save of 8.5 million parameters, ms: median (p10-p90)", ["variant", *PARTS], parts),
            table("Ratios of medians, with 95 % intervals; held is selection and write", ["variant", *head], ratios),
        ]
    )


def compare(name: str, found: dict[str, list[float]]) -> list[dict[str, float]]:
    """Return the ratios of one variant."""
    held = [selection + write for selection, write in zip(found["selection"], found["write"], strict=True)]
    per_step = [selection / WAYS[name].period for selection in found["selection"]]
    pairs = [
        (found["write"], found["copy"]),
        (held, found["copy"]),
        (held, found["together"]),
        (found["selection"], found["step"]),
        (per_step, found["step"]),
    ]
    return [ratio(a, b, paired=True) for a, b in pairs]


def main() -> None:
    """Measure and print."""
    options = command_line(__doc__, repetitions=30).parse_args()
    torch.set_num_threads(1)
    times = measure(options.repetitions)
    print(show(times), flush=True)
    results = {name: {"times_ms": found, "ratios": compare(name, found)} for name, found in times.items()}
    write_json(options.json, settings=vars(options), results=results)


if __name__ == "__main__":
    main()
