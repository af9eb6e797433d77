"""A GPT-2 of two thousand parameters with the Trainer of Transformers: it gathers losses, logits and labels."""

import torch
from common import BACKEND, finished
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS = 6


class Tokens(torch.utils.data.Dataset):
    """Random sequences of tokens."""

    def __init__(self, count):
        source = torch.Generator().manual_seed(5)
        self._ids = torch.randint(0, 32, (count, 8), generator=source)

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, index):
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def right(prediction):
    """The share of the labels that are predicted, and how many predictions were gathered."""
    found = prediction.predictions.argmax(-1)
    return {"accuracy": float((found == prediction.label_ids).mean()), "gathered": len(found)}


set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir="unused",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend=BACKEND,
        disable_tqdm=True,
        seed=1,
    ),
    train_dataset=Tokens(64),
    eval_dataset=Tokens(16),
    compute_metrics=right,
)
trainer.train()
last = trainer.evaluate()
finished(trainer.model, steps=trainer.state.global_step, gathered=last["eval_gathered"])
