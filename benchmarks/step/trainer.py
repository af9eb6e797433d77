"""How long a step of the Trainer of Transformers takes: on a session of Holdfast, and through DDP on Gloo.

    python benchmarks/step/trainer.py [--workers 2] [--rounds 15] [--steps 4] [--fabric ulfm gloo] [--json FILE]

Both train the same GPT-2 with the same number of samples in a step: DDP a batch on each process, Holdfast a mini-batch
with one slice for each worker. Their jobs are started first and then take turns, block by block, as in step_time.py.
The first step of a block is excluded. Needs the extras ``mpi`` and ``transformers``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cells, command_line, free_port, interval, ratio, spread, table, turned, write_json
from step.step_time import BLOCK_S, WARM_UP_STEPS, Contender, Turns

DDP = "ddp-gloo"
LENGTH, VOCABULARY, SAMPLES = 64, 4096, 4
"""Tokens of a sample, size of the vocabulary, samples of a worker in a step."""
WIDTH, LAYERS = 256, 4
ENDLESS = 1_000_000
"""Steps of a training that the benchmark ends."""


def work(system: str, workers: int) -> None:
    """Train until the benchmark says stop."""
    if system == DDP:
        from transformers import Trainer
    else:
        from holdfast.integrations.transformers import Trainer
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    turns = Turns(list)

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Lets the benchmark decide when a step begins."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not turns.again():
                control.should_training_stop = True

    torch.manual_seed(0)
    sequences = torch.randint(VOCABULARY, (512, LENGTH))
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=ENDLESS,
            per_device_train_batch_size=SAMPLES if system == DDP else SAMPLES * workers,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            ddp_backend="gloo" if system == DDP else None,
            ddp_find_unused_parameters=False,
        )
        dataset = [{"input_ids": ids, "labels": ids} for ids in sequences]
        Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=dataset, callbacks=[Steps()]).train()


class TrainerJob(Contender):
    """A job of one system, started and waiting for its turn."""

    def _start(self, _: list[str]) -> None:
        script = [str(Path(__file__).resolve()), "work", self.system, str(self._workers)]
        if self.system == DDP:
            self._env["MASTER_PORT"] = str(free_port())
            for rank in range(self._workers):
                self._run([sys.executable, *script], RANK=str(rank), LOCAL_RANK=str(rank))
            return
        fabric = self.system.removeprefix("holdfast-")
        options = ["-n", str(self._workers), "--fabric", fabric, "--stall-timeout", str(int(BLOCK_S))]
        self._run([sys.executable, "-m", "holdfast", "run", *options, *script])


def measure(options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return the step times in milliseconds, by system and round."""
    systems = [DDP, *(f"holdfast-{fabric}" for fabric in options.fabric)]
    times: dict[str, list[list[float]]] = {system: [] for system in systems}
    jobs: list[TrainerJob] = []
    try:
        jobs += [TrainerJob(system, "gpt2", options.workers, None) for system in systems]
        for job in jobs:
            job.wait_until_ready()
        for job in jobs:
            job.block(WARM_UP_STEPS)
        for number in range(options.rounds):
            for job in turned(jobs, number):
                answer = job.block(1 + options.steps)
                times[job.system].append([1e3 * t for worker in answer for t in worker[1:]])
    finally:
        for job in jobs:
            job.end()
    return times


def main() -> int:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = command_line(__doc__, workers=2, rounds=15, steps=4, fabric=["ulfm", "gloo"])
    options = parser.parse_args()
    times = measure(options)
    blocks = {system: [statistics.median(block) for block in rounds] for system, rounds in times.items()}
    found = {
        system: {
            "step_ms": spread([t for block in rounds for t in block]),
            "to_ddp": ratio(blocks[system], blocks[DDP], paired=True),
        }
        for system, rounds in times.items()
    }
    rows = [
        [system, *cells([t for block in times[system] for t in block], 0), interval(values["to_ddp"], 3)]
        for system, values in found.items()
    ]
    title = f"Trainer, GPT-2 with {LAYERS} layers of {WIDTH}, {options.workers} workers on {os.cpu_count()} cores; ms"
    print(table(title, ["system", "step p50", "p10", "p90", f"to {DDP}"], rows))
    write_json(options.json, settings=vars(options), results=found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
