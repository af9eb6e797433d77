"""The Trainer of Transformers survives the loss of workers.

What you will see: two of three workers die, and the last one finishes with the weights of the undisturbed run.

Run:
    holdfast run -n 3 --fabric gloo --inject kill:rank=0,step=3,phase=allreduce --inject kill:rank=2,step=8 examples/frameworks/transformers_after.py
    holdfast run -n 3 --fabric gloo examples/frameworks/transformers_after.py    undisturbed
    HOLDFAST_SLICES=3 python examples/frameworks/transformers_after.py           one process, the same weights

*Covers:* holdfast.integrations.transformers.Trainer. The script without Holdfast is transformers_before.py.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from holdfast.integrations.transformers import Trainer

torch.manual_seed(0)
dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
args = TrainingArguments("gpt2", num_train_epochs=2, per_device_train_batch_size=12, use_cpu=True, disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
trainer.save_model()
