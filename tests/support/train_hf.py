"""Trains a tiny GPT-2 with the Trainer: ``train_hf.py FOLDER [ddp]``. ``KILL=rank:step:place`` kills that worker for good."""

import os
import signal
import sys

from hf_tiny import arguments, sha256, tiny_model, tokens
from transformers import Trainer as PlainTrainer
from transformers import TrainerCallback

KILL = [
    (int(rank), int(step), place)
    for rank, step, place in (one.split(":") for one in os.environ.get("KILL", "").split())
]
RANK = int(os.environ.get("RANK", "0"))  # before the Trainer of Holdfast hides it

if "ddp" not in sys.argv:
    from holdfast.integrations.transformers import Trainer
else:
    Trainer = PlainTrainer


class Kill(TrainerCallback):
    """Sends this process SIGKILL from outside of Holdfast."""

    def _reach(self, state, place: str) -> None:
        if (RANK, state.global_step, place) in KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args, state, control, **_):
        self._reach(state, "step")

    def on_prediction_step(self, args, state, control, **_):
        self._reach(state, "evaluate")


folder = sys.argv[1]
model = tiny_model()
trainer = Trainer(
    model=model,
    args=arguments(
        folder,
        max_steps=8,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        **({"ddp_backend": "gloo", "ddp_timeout": 30} if Trainer is PlainTrainer else {}),
    ),
    train_dataset=tokens(24, ragged=True),
    eval_dataset=tokens(8),
    callbacks=[Kill()],
)
trainer.train()
trainer.save_model(f"{folder}/final")
print(f"weights {sha256(model)}", flush=True)
