"""How long a step of a split model takes: ``Sharded`` beside torch's FSDP2, ``Pipeline`` beside torch's GPipe schedule.

    python benchmarks/step/split.py [--models mlp transformer] [--workers 2 4] [--kinds sharded pipeline] [--json FILE]

=================  ================================================================================================
system             what runs
=================  ================================================================================================
fsdp2-gloo         ``fully_shard`` on every layer and on the model, on Gloo
holdfast-sharded   ``holdfast.Session`` of a ``holdfast.Sharded``, one shard a worker, started by ``holdfast run``
gpipe-gloo         ``ScheduleGPipe`` of ``torch.distributed.pipelining``, one stage a worker, on Gloo
holdfast-pipeline  ``holdfast.Session`` of a ``holdfast.Pipeline`` of the same stages, started by ``holdfast run``
=================  ================================================================================================

Both systems of a pair train the same model with the same optimizer on the same samples, and take turns as in
``step_time.py``. Holdfast keeps one hot standby of each part; ``--mirror 0`` measures it without. After the last block
the weights of both are compared; a system that trained something else has failed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import command_line, ratio, spread, table, write_json
from models import CONTEXT, JOBS, Transformer, loss_of, make_model
from step.step_time import TOLERANCE, WARM_UP_STEPS, Contender, Race, SystemFailed, Turns, interval
from torch import nn
from torch.nn import functional as F

PAIRS = {"sharded": ("fsdp2-gloo", "holdfast-sharded"), "pipeline": ("gpipe-gloo", "holdfast-pipeline")}
"""By kind: the baseline, and Holdfast."""
MODELS = ("mlp", "transformer")
MICRO_BATCHES = 4
"""Micro-batches of a pipeline in a step."""


# ---------------------------------------------------------------------------------------------
# The workers


class Embedded(nn.Module):
    """The first stage of the transformer.

    Args:
        whole: The whole model.
    """

    def __init__(self, whole: Transformer) -> None:
        super().__init__()
        self.characters, self.places = whole.characters, whole.places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a vector for each character and its position."""
        return self.characters(x) + self.places(torch.arange(CONTEXT))


def stages_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Cut a model into ``count`` stages of about as many layers each."""
    if isinstance(model, Transformer):
        units: list[list[nn.Module]] = [[Embedded(model)], *([layer] for layer in model.layers)]
        units.append([model.norm, model.head])
    else:
        units = [[]]
        for layer in model.children():
            if isinstance(layer, nn.Linear) and any(isinstance(before, nn.Linear) for before in units[-1]):
                units.append([])
            units[-1].append(layer)
    ends = [len(units) * n // count for n in range(count + 1)]
    return [nn.Sequential(*itertools.chain(*units[a:b])) for a, b in itertools.pairwise(ends)]


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over a micro-batch."""
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Training:
    """The model and data that both systems train.

    Args:
        name: Name of the model.
        workers: Number of workers.
        text: Path of a text, for the transformer.
    """

    def __init__(self, name: str, workers: int, text: Path | None) -> None:
        self.job = JOBS[name]
        self.workers = workers
        self.batch_size = workers * self.job.samples
        self.dataset = self.job.data(16 * self.batch_size, text)
        self.model = make_model(name)
        self.start = sample(self.model.parameters())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer for some parameters."""
        return torch.optim.SGD(parameters, lr=self.job.learning_rate, momentum=0.9)

    def batches(self, turns: Turns) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the mini-batches of all workers together; as in a session, the last one is asked to stop."""
        step, goes_on = 0, True
        while goes_on:
            goes_on = turns.again()
            at = step * self.batch_size % len(self.dataset)
            x, y = (tensor[at : at + self.batch_size] for tensor in self.dataset.tensors)
            yield x, y
            step += 1

    def moved(self, parameters: Any) -> list[float]:
        """Return how far training has moved a few values of each parameter of the whole model."""
        return [after - before for after, before in zip(sample(parameters), self.start, strict=True)]


def sample(parameters: Any) -> list[float]:
    """Return a few values of each parameter, in order."""
    flat = [parameter.detach().flatten() for parameter in parameters]
    return [value for one in flat for value in one[:: max(1, len(one) // 16)].tolist()]


def work(system: str, name: str, workers: int, text: Path | None) -> None:
    """Run one worker of ``system``; at the end report how far the weights have moved."""
    torch.set_num_threads(1)
    training = Training(name, workers, text)
    turns = Turns(list)
    turns.tell(WORK[system](training, turns))


def work_fsdp2(training: Training, turns: Turns) -> list[float]:
    """Train with ``fully_shard``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (training.workers,)), training.model
    layers = model.layers if isinstance(model, Transformer) else model.children()
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, samples = training.optimizer(model.parameters()), training.job.samples
    for x, y in training.batches(turns):
        mine = slice(dist.get_rank() * samples, (dist.get_rank() + 1) * samples)
        optimizer.zero_grad()
        loss_of(model, x[mine], y[mine]).backward()
        optimizer.step()
    moved = training.moved([parameter.full_tensor() for parameter in model.parameters()])
    dist.destroy_process_group()
    return moved


def work_gpipe(training: Training, turns: Turns) -> list[float]:
    """Train with torch's schedule."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), training.workers - 1
    stages = stages_of(training.model, training.workers)
    stage = PipelineStage(stages[rank], rank, len(stages), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss)
    optimizer = training.optimizer(stages[rank].parameters())
    for x, y in training.batches(turns):
        optimizer.zero_grad()
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": y} if rank == last else {}))
        optimizer.step()
    for number, one in enumerate(stages):
        for parameter in one.parameters():
            dist.broadcast(parameter.detach(), number)
    dist.destroy_process_group()
    return training.moved(training.model.parameters())


def work_sharded(training: Training, turns: Turns) -> list[float]:
    """Train with a session of a sharded model."""
    import holdfast

    model = training.model
    session = holdfast.Session(holdfast.Sharded(model), training.optimizer)
    for step in session.steps(training.dataset, training.batch_size, epochs=100_000, shuffle=False):
        if not turns.again():
            step.stop()
        for x, y in step:
            step.backward(loss_of(model, x, y))
    return training.moved(model.parameters())


def work_pipeline(training: Training, turns: Turns) -> list[float]:
    """Train with a session of a pipeline."""
    import holdfast

    model = holdfast.Pipeline(stages_of(training.model, training.workers), loss)
    session = holdfast.Session(model, training.optimizer, slices=MICRO_BATCHES)
    for step in session.steps(training.dataset, training.batch_size, epochs=100_000, shuffle=False):
        if not turns.again():
            step.stop()
        step.compute()
    assert model.module is not None
    for mine, trained in zip(stages_of(training.model, training.workers), model.module, strict=True):
        mine.load_state_dict(trained.state_dict())
    return training.moved(training.model.parameters())


WORK: dict[str, Callable[[Training, Turns], list[float]]] = {
    "fsdp2-gloo": work_fsdp2,
    "holdfast-sharded": work_sharded,
    "gpipe-gloo": work_gpipe,
    "holdfast-pipeline": work_pipeline,
}


# ---------------------------------------------------------------------------------------------
# The benchmark


class SplitContender(Contender):
    """The job of one system; its workers run this file."""

    def _start(self, script: list[str]) -> None:
        super()._start([str(Path(__file__).resolve()), *script[1:]])

    def finish_with_weights(self) -> list[list[float]]:
        """End the training, and return how far it has moved the weights of each worker."""
        return self._ask("0")


class SplitRace(Race):
    """One table: a pair of systems with one model and one number of workers.

    Args:
        options: The command line.
        kind: Kind of the pair.
        name: Name of the model.
        workers: Number of workers.
    """

    def __init__(self, options: argparse.Namespace, kind: str, name: str, workers: int) -> None:
        self._kind = kind
        super().__init__(argparse.Namespace(**(vars(options) | {"systems": PAIRS[kind]})), name, workers)

    def run(self) -> None:
        """Start both, let them take turns, end them, compare their results."""
        steps = self._options.steps or JOBS[self._name].steps
        try:
            self._start()
            self._everybody(lambda contender: contender.block(WARM_UP_STEPS))
            for number in range(self._options.rounds):
                order = [*self._running][:: -1 if number % 2 else 1]
                self._everybody(lambda contender: self._measure(contender, steps), order)
            self._everybody(self._check_at_the_end)
        finally:
            for contender in self._running.values():
                contender.end()

    def _start(self) -> None:
        for system in PAIRS[self._kind]:
            self._running[system] = SplitContender(system, self._name, self._workers, self._options.data)
        self._everybody(Contender.wait_until_ready)

    def _check_at_the_end(self, contender: SplitContender) -> None:
        moved = contender.finish_with_weights()
        self._reference = self._reference or moved[0]
        distance = max(math.dist(worker, self._reference) for worker in moved) / math.hypot(*self._reference)
        if not distance < TOLERANCE:
            raise SystemFailed(f"its weights differ by {distance:.2g} of the distance that training moved them")

    def summary(self) -> dict[str, Any]:
        """Return the results by system."""
        base, _ = PAIRS[self._kind]
        found: dict[str, Any] = {system: {"failed": text} for system, text in self.failed.items()}
        good = {system: rounds for system, rounds in self.times.items() if rounds and system not in self.failed}
        medians = {system: [statistics.median(block) for block in rounds] for system, rounds in good.items()}
        for system, rounds in good.items():
            found[system] = {"step_ms": spread([t for block in rounds for t in block])}
            if base in medians:
                found[system]["to_base"] = ratio(medians[system], medians[base], paired=True)
        return found

    def table(self) -> str:
        """Return the results as a table."""
        base, _ = PAIRS[self._kind]
        title = f"{self._kind} {self._name}, {self._workers} workers on {os.cpu_count()} cores, {JOBS[self._name].samples} samples a worker; ms"
        rows = []
        for system, found in self.summary().items():
            if "failed" in found:
                rows.append([system, "failed", "", "", ""])
                continue
            step = found["step_ms"]
            cells = [f"{step[key]:.1f}" for key in ("p50", "p10", "p90")]
            rows.append([system, *cells, interval(found.get("to_base"))])
        return table(title, ["system", "step p50", "p10", "p90", f"to {base}"], rows)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__, rounds=(5, "number of blocks of each system"), mirror=(1, "hot standbys of each part under Holdfast")
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--workers", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=[*PAIRS], default=[*PAIRS])
    parser.add_argument("--steps", type=int, help="steps measured in a block; default: by model")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a text for the transformer; default: made-up words")
    return parser.parse_args()


def main() -> int:
    """Measure everything and print a table for each kind, model and number of workers."""
    options = parse()
    os.environ["HOLDFAST_MIRROR"] = str(options.mirror)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the jobs end too
    results, failed = [], False
    for kind in options.kinds:
        for workers in options.workers:
            for name in options.models:
                race = SplitRace(options, kind, name, workers)
                race.run()
                print(f"{race.table()}\n", flush=True)
                failed |= bool(race.failed)
                found = {"kind": kind, "model": name, "workers": workers, "mirror": options.mirror}
                results.append(found | {"systems": race.summary(), "blocks_ms": race.times})
    write_json(options.json, results=results)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]) if sys.argv[5] else None)
    else:
        sys.exit(main())
