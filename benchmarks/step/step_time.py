"""How long a step takes: four models, several workers, each system a real job of real processes.

    python benchmarks/step/step_time.py [--models cnn mlp] [--workers 2 4] [--systems alone ddp-gloo holdfast] [--json FILE]

================  =================================================================================================
system            what runs
================  =================================================================================================
alone             the plain loop in as many processes in parallel, with no communication: the machine's limit
ddp-gloo          DistributedDataParallel on Gloo
holdfast          ``holdfast.Session``, started by ``holdfast run``
holdfast-prepare  a plain loop over objects of ``holdfast.prepare``, started by ``holdfast run``
holdfast-ddp      the script of ddp-gloo with ``init_process_group("holdfast")``, started by ``holdfast run``
torchft           torchft's DistributedDataParallel, Optimizer and Manager on Gloo, with its lighthouse, at its defaults
ddp-accumulate    ddp-gloo in the slices of ``--slices``: micro-batches, all but the last under ``no_sync``
holdfast-slices   holdfast in these slices, by ``step.compute``
================  =================================================================================================

All jobs of a table are started first and then take turns: in each of ``--rounds`` rounds every system trains a block
of steps while the others wait, in a different order each time, so that other load on the machine affects all of them.
Workers time their own steps, from the start of one to the start of the next; the first step of a block, which wakes
the workers, is excluded. There are a few warm-up steps before the first round. After them the weights of all systems
that exchange gradients are compared; a system with a wrong all-reduce has failed.

The defaults take about ten minutes on two otherwise idle cores. ``--rounds 30`` gives narrower intervals;
``--steps`` sets the length of a block. The peers' environment comes from ``make bench-peers``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import PEERS_PYTHON, command_line, free_port, interval, ratio, spread, table, turned, write_json
from models import JOBS, loss_of, make_model, mean_loss, optimizer_of

SYSTEMS = ("alone", "ddp-gloo", "holdfast", "holdfast-prepare", "holdfast-ddp", "torchft")
SLICED = ("ddp-accumulate", "holdfast-slices")
"""Systems that are measured only if they are named; they take ``--slices``."""
BASE = "ddp-gloo"
"""The baseline."""
START_S = 180.0
"""Time limit for the start of a job, in seconds."""
BLOCK_S = 300.0
"""Time limit for a block, in seconds."""
WARM_UP_STEPS = 3
"""Steps before the first round: buckets are rebuilt, memory is allocated."""
TOLERANCE = 1e-3
"""Largest distance of two systems' weights after the warm-up, as a share of the distance that training moved them."""


class SystemFailed(Exception):
    """A system did not work as requested."""


# ---------------------------------------------------------------------------------------------
# The workers


class Turns:
    """The benchmark's instructions to a worker: when to train, and for how many steps.

    Args:
        weights: Returns the values reported about the weights.
    """

    def __init__(self, weights: Callable[[], list[float]]) -> None:
        self._weights = weights
        connection = socket.create_connection(("127.0.0.1", int(os.environ["BENCHMARK_PORT"])))
        self._stream = connection.makefile("rw")
        self._wanted = 0
        self._times: list[float] = []

    def again(self) -> bool:
        """Return whether another step is wanted. Call it at the start of a step, after the previous one has ended."""
        self._times.append(time.perf_counter())
        if len(self._times) <= self._wanted:
            return True
        self.tell([after - before for before, after in zip(self._times, self._times[1:], strict=False)])
        while (asked := self._stream.readline().strip()) == "weights":
            self.tell(self._weights())
        self._wanted = int(asked or 0)
        self._times = [time.perf_counter()]
        return self._wanted > 0

    def tell(self, answer: Any) -> None:
        """Send a line to the benchmark."""
        self._stream.write(json.dumps(answer) + "\n")
        self._stream.flush()


class Training:
    """The common training of every system: the same model, samples and optimizer."""

    def __init__(self, name: str, workers: int, text: Path | None) -> None:
        self.job = JOBS[name]
        self.workers, self.batch_size = workers, workers * self.job.samples
        self.dataset = self.job.data(16 * self.batch_size, text)
        self.model = make_model(name)
        self.make_optimizer = optimizer_of(name)
        self._start = sample(self.model.parameters())

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the whole model."""
        return self.make_optimizer(self.model.parameters())

    def loop(
        self,
        turns: Turns,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Train by the usual torch loop; ``backward`` computes the gradients, by default in one pass."""
        compute = backward or (lambda x, y: loss_of(model, x, y).backward())
        step = 0
        while turns.again():
            at = (step * self.workers + rank) * self.job.samples % len(self.dataset)
            index = torch.arange(at, at + self.job.samples)
            x, y = (tensor[index] for tensor in self.dataset.tensors)
            optimizer.zero_grad()
            compute(x, y)
            optimizer.step()
            step += 1

    def moved(self, parameters: Any = None) -> list[float]:
        """Return how far training has moved a few values of each parameter; of a split model, ``parameters`` are whole."""
        return [b - a for b, a in zip(sample(parameters or self.model.parameters()), self._start, strict=True)]


def sample(parameters: Any) -> list[float]:
    """Return a few values of each parameter, in order."""
    flat = [parameter.detach().flatten() for parameter in parameters]
    return [value for one in flat for value in one[:: max(1, len(one) // 16)].tolist()]


def work(system: str, name: str, workers: int, text: Path | None) -> None:
    """Run one worker of ``system``."""
    torch.set_num_threads(1)
    training = Training(name, workers, text)
    turns = Turns(training.moved)
    slices = int(os.environ.get("BENCHMARK_SLICES", "0"))
    {
        "alone": work_alone,
        "ddp-gloo": lambda *job: work_ddp(*job, backend="gloo"),
        "holdfast": work_holdfast,
        "holdfast-prepare": work_prepare,
        "holdfast-ddp": lambda *job: work_ddp(*job, backend="holdfast"),
        "torchft": work_torchft,
        "ddp-accumulate": lambda *job: work_ddp(*job, backend="gloo", slices=slices),
        "holdfast-slices": lambda *job: work_holdfast(*job, slices=slices),
    }[system](training, turns)
    turns.tell("done")


def work_alone(training: Training, turns: Turns) -> None:
    """Train without communication."""
    training.loop(turns, int(os.environ["RANK"]), training.model, training.optimizer)


def work_ddp(training: Training, turns: Turns, *, backend: str, rounds: bool = False, slices: int = 0) -> None:
    """Train with DistributedDataParallel.

    Args:
        training: Its training.
        turns: The benchmark's instructions.
        backend: Of torch.distributed.
        rounds: Whether gradients are compressed to float16.
        slices: Micro-batches of all workers; 0 for one pass of each.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if backend == "holdfast":
        import holdfast.distributed  # noqa: F401 - registers its backend with torch
    dist.init_process_group(backend)
    model, mine = DistributedDataParallel(training.model), slices // training.workers
    if rounds:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)

    def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
        *parts, last = zip(x.chunk(mine), y.chunk(mine), strict=True)
        with model.no_sync():
            for part in parts:
                (loss_of(model, *part) / mine).backward()
        (loss_of(model, *last) / mine).backward()

    training.loop(turns, dist.get_rank(), model, training.optimizer, accumulate if slices else None)
    dist.destroy_process_group()


def work_holdfast(training: Training, turns: Turns, *, slices: int = 0) -> None:
    """Train with a session; ``slices``: its mini-batch is cut into so many, computed by ``step.compute``."""
    import holdfast

    model = training.model
    session = holdfast.Session(model, training.optimizer, **({"slices": slices} if slices else {}))
    for step in session.steps(training.dataset, training.batch_size, epochs=100_000, shuffle=False):
        if not turns.again():
            step.stop()
        if slices:
            step.compute(model, mean_loss)
            continue
        for x, y in step:
            step.backward(loss_of(model, x, y))


def work_prepare(training: Training, turns: Turns) -> None:
    """Train by the usual torch loop, over prepared objects."""
    from torch.utils.data import DataLoader

    import holdfast

    loader = DataLoader(training.dataset, batch_size=training.batch_size)
    model, optimizer, loader = holdfast.prepare(training.model, training.optimizer, loader)
    while not loader.stopped:
        for x, y in loader:
            if not turns.again():
                loader.stop()
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def work_torchft(training: Training, turns: Turns) -> None:
    """Train as a replica group of one worker."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["RANK"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=training.model.load_state_dict,
        state_dict=training.model.state_dict,
        min_replica_size=training.workers,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
        init_sync=False,  # all start with the same weights; otherwise all but one contribute zeros to the first all-reduce
    )
    steps = CountedTurns(turns)
    model = DistributedDataParallel(manager, training.model)
    training.loop(steps, rank, model, Optimizer(manager, training.optimizer))
    if manager.current_step() != steps.count:
        sys.exit(f"{manager.current_step()} of {steps.count} steps were committed")
    manager.shutdown(wait=False)


class CountedTurns(Turns):
    """Counts the steps of a system that may silently skip some.

    Args:
        turns: The instructions that are counted.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.count = -1

    def again(self) -> bool:
        """Return whether another step is wanted."""
        self.count += 1
        return self._turns.again()


# ---------------------------------------------------------------------------------------------
# The jobs


class Contender:
    """The job of one system, started and waiting for its turn.

    Args:
        system: Its name.
        name: Name of the model.
        workers: Number of workers.
        text: Path of a text, for the transformer.
    """

    words: Sequence[str] = ()
    """Further options of ``holdfast run``."""

    def __init__(self, system: str, name: str, workers: int, text: Path | None) -> None:
        self.system = system
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the job runs
        self._workers = workers
        self._streams: list[Any] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._env = os.environ | {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCHMARK_PORT": str(self._server.getsockname()[1]),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers),
        }  # fmt: skip
        self._start([str(Path(__file__).resolve()), "work", system, name, str(workers), str(text or "")])

    def _start(self, script: list[str]) -> None:
        if self.system.startswith("holdfast"):
            options = ["-n", str(self._workers), "--max-restarts", "0", "--stall-timeout", str(int(BLOCK_S))]
            self._run([sys.executable, "-m", "holdfast", "run", *options, *self.words, *script])
            return
        python = sys.executable
        if self.system == "torchft":
            python = str(PEERS_PYTHON)
            port = free_port()
            self._env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
            lighthouse = str(PEERS_PYTHON.with_name("torchft_lighthouse"))
            self._run([lighthouse, "--bind", f"[::]:{port}", "--min_replicas", str(self._workers)])
        for rank in range(self._workers):
            self._run([python, *script], RANK=str(rank), LOCAL_RANK=str(rank))

    def _run(self, command: list[str], **env: str) -> None:
        try:
            # No sessions of their own: Linux divides a busy machine among sessions first, then among their processes.
            process = subprocess.Popen(
                command, env=self._env | env, stdout=self.log, stderr=self.log, text=True, process_group=0
            )
        except FileNotFoundError as error:
            raise SystemFailed(f"{error.filename} is missing: run make bench-peers") from error
        self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Return when every worker is at its first step."""
        self._server.settimeout(0.2)
        end_s = time.monotonic() + START_S
        while len(self._streams) < self._workers:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._server.accept()
                connection.settimeout(START_S)
                self._streams.append(connection.makefile("rw"))
            if any(process.poll() for process in self._processes) or time.monotonic() > end_s:
                raise SystemFailed(self._last_words())
        self._hear()

    def block(self, steps: int) -> list[list[float]]:
        """Train ``steps`` steps and return how long each took, by worker."""
        return self._ask(str(steps))

    def weights(self) -> list[list[float]]:
        """Return how far training has moved the weights of each worker."""
        return self._ask("weights")

    def finish(self) -> list[Any]:
        """End the training; return the last words of each worker."""
        return self._ask("0")

    def _ask(self, message: str) -> list[Any]:
        with contextlib.suppress(OSError):  # a dead worker's pipe is closed
            for stream in self._streams:
                stream.write(f"{message}\n")
                stream.flush()
        return self._hear()

    def _hear(self) -> list[Any]:
        try:
            lines = [stream.readline() for stream in self._streams]
        except OSError:
            lines = [""]
        if not all(lines):
            time.sleep(1)  # for its last output
            raise SystemFailed(self._last_words())
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it did not answer"])[-1]

    def end(self) -> None:
        """Leave no process behind."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._server.close()
        for process in self._processes[::-1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5 if len(self._streams) == self._workers else 0)
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.log.close()


# ---------------------------------------------------------------------------------------------
# The benchmark


class Race:
    """One table: all systems with one model and one number of workers.

    Args:
        options: The command line.
        name: Name of the model.
        workers: Number of workers.
    """

    contender = Contender
    base = BASE

    def __init__(self, options: argparse.Namespace, name: str, workers: int) -> None:
        self._options = options
        self.name, self.workers = name, workers
        self._running: dict[str, Contender] = {}
        self._reference: list[float] = []
        self.failed: dict[str, str] = {}
        self.times: dict[str, list[list[float]]] = {system: [] for system in options.systems}
        """Step times of all workers in milliseconds, by system and round."""

    def run(self) -> None:
        """Start the jobs, compare their results, let them take turns, end them."""
        steps = self._options.steps or JOBS[self.name].steps
        try:
            self._start()
            self._everybody(lambda contender: contender.block(WARM_UP_STEPS))
            self._begin()
            for number in range(self._options.rounds):
                order = turned([*self._running], number)
                self._everybody(lambda contender: self._measure(contender, steps), order)
            self._everybody(self._finish)
        finally:
            for contender in self._running.values():
                contender.end()

    def _start(self) -> None:
        for system in self._options.systems:
            try:
                self._running[system] = self.contender(system, self.name, self.workers, self._options.data)
            except SystemFailed as failure:
                self._fail(system, failure)
        self._everybody(Contender.wait_until_ready)

    def _everybody(self, act: Any, order: list[str] | None = None) -> None:
        for system in order or [*self._running]:
            try:
                act(self._running[system])
            except SystemFailed as failure:
                self._running.pop(system).end()
                self._fail(system, failure)

    def _measure(self, contender: Contender, steps: int) -> None:
        # Without communication one worker may finish before the others, which then get more of the machine.
        alone = contender.system == "alone"
        answer = contender.block(1 + steps + alone)
        self.times[contender.system].append([1e3 * t for worker in answer for t in worker[1 : 1 + steps]])

    def _begin(self) -> None:
        self._everybody(lambda contender: contender.system == "alone" or self._compare(contender.weights()))

    def _finish(self, contender: Contender) -> None:
        contender.finish()

    def _compare(self, moved: list[list[float]]) -> None:
        self._reference = self._reference or moved[0]
        distance = max(math.dist(worker, self._reference) for worker in moved) / math.hypot(*self._reference)
        if not distance < TOLERANCE:
            raise SystemFailed(
                f"its weights differ from those of other systems by {distance:.2g} of the distance that training moved them"
            )

    def _fail(self, system: str, failure: SystemFailed) -> None:
        self.failed[system] = str(failure)
        print(f"{self.name}, {self.workers} workers: {system} failed: {failure}", file=sys.stderr)

    def summary(self) -> dict[str, Any]:
        """Return the results by system."""
        blocks = {
            system: [statistics.median(block) for block in rounds]
            for system, rounds in self.times.items()
            if rounds and system not in self.failed
        }
        found: dict[str, Any] = {}
        for system in self.times:
            if system not in blocks:
                found[system] = {"failed": self.failed.get(system, "not measured")}
                continue
            found[system] = {"step_ms": spread([t for block in self.times[system] for t in block])}
            if self.base in blocks:
                found[system]["to_base"] = ratio(blocks[system], blocks[self.base], paired=True)
            if "alone" in blocks:
                found[system] |= adds(blocks[system], blocks["alone"], blocks.get(self.base))
        return found

    def table(self) -> str:
        """Return the results as a table."""
        head = ["system", "step p50", "p10", "p90", f"to {self.base}", "communication adds", f"to {self.base}'s"]
        return table(self.title(), head, [row(system, found) for system, found in self.summary().items()])

    def title(self) -> str:
        """Return the title of the table."""
        samples = JOBS[self.name].samples
        return f"{self.name}, {self.workers} workers on {os.cpu_count()} cores, {samples} samples a worker; ms"


def run_race(race: Race) -> dict[str, Any]:
    """Run a race, print its table, and return what it has found."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the jobs end too
    race.run()
    print(f"{race.table()}\n", flush=True)
    return {"model": race.name, "workers": race.workers, "systems": race.summary(), "blocks_ms": race.times}


def any_failed(results: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a system of a race has failed."""
    return any("failed" in found for result in results for found in result["systems"].values())


def adds(blocks: list[float], alone: list[float], base: list[float] | None) -> dict[str, Any]:
    """Return the communication time of a step, and its ratio to that of the base system."""
    added = [step - plain for step, plain in zip(blocks, alone, strict=True)]
    found: dict[str, Any] = {"adds_ms": statistics.median(added)}
    if base:
        base_added = [step - plain for step, plain in zip(base, alone, strict=True)]
        if min(base_added) > 0:  # otherwise it is within the noise, and a ratio to it is meaningless
            found["adds_to_base"] = ratio(added, base_added, paired=True)
    return found


def row(system: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    if "failed" in found:
        return [system, "failed", "", "", "", "", ""]
    step = found["step_ms"]
    cells = [system, *(f"{step[key]:.1f}" for key in ("p50", "p10", "p90")), interval(found.get("to_base"))]
    if system == "alone" or "adds_ms" not in found:
        return [*cells, "", ""]
    return [*cells, f"{found['adds_ms']:.1f}", interval(found.get("adds_to_base"))]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(
        __doc__,
        workers=[2, 4],
        slices=(8, "slices of a step for ddp-accumulate and holdfast-slices"),
        rounds=(5, "number of blocks of each system"),
        models=([*JOBS], None, [*JOBS]),
        systems=([*SYSTEMS], None, [*SYSTEMS, *SLICED]),
        data=(None, "a text for the transformer; default: made-up words"),
    )
    parser.add_argument("--steps", type=int, help="steps measured in a block; default: by model")
    options = parser.parse_args()
    uneven = [str(workers) for workers in options.workers if options.slices % workers]
    if uneven and set(options.systems) & set(SLICED):
        parser.error(f"--slices must be a multiple of the workers ({', '.join(uneven)}), got {options.slices}")
    os.environ["BENCHMARK_SLICES"] = str(options.slices)
    return options


def main() -> int:
    """Measure everything and print a table for each model and number of workers."""
    options = parse()
    races = itertools.product(options.workers, options.models)
    results = [run_race(Race(options, name, workers)) for workers, name in races]
    write_json(options.json, results=results)
    return int(any_failed(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]) if sys.argv[5] else None)
    else:
        sys.exit(main())
