"""A script with the Trainer of Transformers, before two of its lines change: see transformers_after.py."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
args = TrainingArguments("gpt2", num_train_epochs=2, per_device_train_batch_size=12, use_cpu=True, disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
trainer.save_model()
