"""The same loop for Hugging Face Accelerate, which now survives failures: another import, and nothing else.

$ holdfast run -n 3 --fabric gloo --inject kill:rank=1,step=5 examples/frameworks/accelerate_after.py
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.accelerate import Accelerator


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, :8].sum(1) > inputs[:, 8:].sum(1)).long())


def main(folder=None):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    train, test = DataLoader(samples(240, 1), batch_size=12, shuffle=True), DataLoader(samples(100, 2), batch_size=50)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)

    for epoch in range(3):
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for inputs, targets in test:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            guesses, targets = accelerator.gather_for_metrics((guesses, targets))
            right.append((guesses == targets).float())
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).mean():.3f}")
        if folder is not None:
            accelerator.save_state(f"{folder}/epoch-{epoch}")
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
