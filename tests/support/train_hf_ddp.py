"""Trains with a plain Trainer and the callback, over DDP: asked to stop by SIGTERM, then with a rank killed."""

import os
import signal
import sys

import torch.distributed as dist
from hf_tiny import arguments, tiny_model, tokens
from transformers import Trainer, TrainerCallback

from holdfast.integrations.transformers import HoldfastCallback

dist.init_process_group("holdfast")
folder = sys.argv[1]


class Strike(TrainerCallback):
    """Sends rank 1 a signal at the end of a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_step_begin(self, args, state, control, **_):
        if dist.get_rank() == 1 and state.global_step == self.step:
            os.kill(os.getpid(), self.number)


for name, strike in (("asked", Strike(signal.SIGTERM, 2)), ("killed", Strike(signal.SIGKILL, 3))):
    args = arguments(f"{folder}/{name}", max_steps=6, save_strategy="steps", save_steps=100)
    trainer = Trainer(model=tiny_model(), args=args, train_dataset=tokens(48), callbacks=[strike, HoldfastCallback()])
    trainer.train()
    print(f"{name} {trainer.state.global_step}", flush=True)
