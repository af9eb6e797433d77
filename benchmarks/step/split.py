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
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import command_line, write_json
from models import CONTEXT, Transformer, loss_of, mean_loss
from step.step_time import Contender, Race, Training, Turns, any_failed, run_race
from torch import nn

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


def batches(training: Training, turns: Turns) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the mini-batches of all workers together; as in a session, the last one is asked to stop."""
    step, goes_on, size = 0, True, training.batch_size
    while goes_on:
        goes_on = turns.again()
        at = step * size % len(training.dataset)
        x, y = (tensor[at : at + size] for tensor in training.dataset.tensors)
        yield x, y
        step += 1


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
    optimizer, samples = training.make_optimizer(model.parameters()), training.job.samples
    for x, y in batches(training, turns):
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
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=mean_loss)
    optimizer = training.make_optimizer(stages[rank].parameters())
    for x, y in batches(training, turns):
        optimizer.zero_grad()
        inputs = (x,) if rank == 0 else ()
        schedule.step(*inputs, **({"target": y} if rank == last else {}))
        optimizer.step()
    for number, one in enumerate(stages):
        for parameter in one.parameters():
            dist.broadcast(parameter.detach(), number)
    dist.destroy_process_group()
    return training.moved()


def work_sharded(training: Training, turns: Turns) -> list[float]:
    """Train with a session of a sharded model."""
    import holdfast

    model = training.model
    session = holdfast.Session(holdfast.Sharded(model), training.make_optimizer)
    for step in session.steps(training.dataset, training.batch_size, epochs=100_000, shuffle=False):
        if not turns.again():
            step.stop()
        for x, y in step:
            step.backward(loss_of(model, x, y))
    return training.moved()


def work_pipeline(training: Training, turns: Turns) -> list[float]:
    """Train with a session of a pipeline."""
    import holdfast

    model = holdfast.Pipeline(stages_of(training.model, training.workers), mean_loss)
    session = holdfast.Session(model, training.make_optimizer, slices=MICRO_BATCHES)
    for step in session.steps(training.dataset, training.batch_size, epochs=100_000, shuffle=False):
        if not turns.again():
            step.stop()
        step.compute()
    assert model.module is not None
    for mine, trained in zip(stages_of(training.model, training.workers), model.module, strict=True):
        mine.load_state_dict(trained.state_dict())
    return training.moved()


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


class SplitRace(Race):
    """One table: a pair of systems with one model and one number of workers; weights are compared after the last block.

    Args:
        options: The command line.
        kind: Kind of the pair.
        name: Name of the model.
        workers: Number of workers.
    """

    contender = SplitContender

    def __init__(self, options: argparse.Namespace, kind: str, name: str, workers: int) -> None:
        self.base, _ = PAIRS[kind]
        self._kind = kind
        super().__init__(argparse.Namespace(**(vars(options) | {"systems": PAIRS[kind]})), name, workers)

    def title(self) -> str:
        """Return the title of the table."""
        return f"{self._kind} {super().title()}"

    def _begin(self) -> None:
        """Compare nothing yet."""

    def _finish(self, contender: Contender) -> None:
        self._compare(contender.finish())


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        rounds=(5, "number of blocks of each system"),
        mirror=(1, "hot standbys of each part under Holdfast"),
        models=([*MODELS], None, MODELS),
        workers=([2, 4], None, (2, 4)),
        kinds=([*PAIRS], None, [*PAIRS]),
        data=(None, "a text for the transformer; default: made-up words"),
    )
    parser.add_argument("--steps", type=int, help="steps measured in a block; default: by model")
    return parser.parse_args()


def main() -> int:
    """Measure everything and print a table for each kind, model and number of workers."""
    options = parse()
    os.environ["HOLDFAST_MIRROR"] = str(options.mirror)
    results = []
    for kind, workers, name in itertools.product(options.kinds, options.workers, options.models):
        results.append({"kind": kind, "mirror": options.mirror} | run_race(SplitRace(options, kind, name, workers)))
    write_json(options.json, results=results)
    return int(any_failed(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]) if sys.argv[5] else None)
    else:
        sys.exit(main())
