"""A tiny causal language model with random tokens, for tests of the Trainer."""

import hashlib
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

LENGTH, VOCABULARY = 12, 32


def tiny_model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def tokens(samples: int, *, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return random sequences; ``ragged`` ones have different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(samples):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        if ragged:
            labels[2 + number * 5 % (LENGTH - 2) :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def arguments(folder: Any, **given: Any) -> TrainingArguments:
    usual = {
        "per_device_train_batch_size": 6,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    return TrainingArguments(str(folder), **(usual | given))


def sha256(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
