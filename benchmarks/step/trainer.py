"""How long a step of the Trainer of Transformers takes: on a session of Holdfast, and through DDP on Gloo.

    python benchmarks/step/trainer.py [--workers 2] [--rounds 15] [--steps 4] [--fabric ulfm gloo] [--json FILE]

Both train the same GPT-2 with the same number of samples in a step: DDP a batch on each process, Holdfast a mini-batch
with one slice for each worker. Their jobs are started first and then take turns, block by block, as in step_time.py.
The first step of a block is excluded. Needs the extras ``mpi`` and ``transformers``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import command_line, write_json
from step.step_time import Contender, Race, Turns, any_failed, run_race

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
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
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
        self.words = ["--fabric", self.system.removeprefix("holdfast-")]
        super()._start([str(Path(__file__).resolve()), "work", self.system, str(self._workers)])


class TrainerRace(Race):
    """The table; weights are not compared."""

    contender = TrainerJob
    base = DDP

    def title(self) -> str:
        """Return the title of the table."""
        what = f"Trainer, GPT-2 with {LAYERS} layers of {WIDTH}"
        return f"{what}, {self.workers} workers on {os.cpu_count()} cores; ms"

    def _begin(self) -> None:
        """Compare nothing."""

    def _finish(self, contender: Contender) -> None:
        """Leave it to the end of the job."""


def main() -> int:
    """Measure, and print a table."""
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], int(sys.argv[3]))
        return 0
    options = command_line(__doc__, workers=2, rounds=15, steps=4, fabric=["ulfm", "gloo"]).parse_args()
    options.systems = [DDP, *(f"holdfast-{fabric}" for fabric in options.fabric)]
    options.data = None
    results = [run_race(TrainerRace(options, "gpt2", options.workers))]
    write_json(options.json, settings=vars(options), results=results)
    return int(any_failed(results))


if __name__ == "__main__":
    raise SystemExit(main())
