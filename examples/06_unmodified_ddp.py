"""A plain DistributedDataParallel script survives the death of ranks. It names Holdfast once: as the backend.

What you will see: two of four ranks die. The all-reduce in the backward pass is retried over the
survivors and averaged over them, and the last lines show that the survivors ended with the same weights.

Run:
    holdfast run -n 4 --inject kill:rank=1,step=40,phase=allreduce --inject kill:rank=2,step=90 examples/06_unmodified_ddp.py
    holdfast run -n 4 examples/06_unmodified_ddp.py                   undisturbed
    mpirun --with-ft ulfm --oversubscribe -n 4 python examples/06_unmodified_ddp.py    without the launcher
    torchrun --nproc-per-node 4 examples/06_unmodified_ddp.py gloo    the same script without Holdfast

If rank 0 dies, the survivors train on, too, but whatever a script does under ``rank == 0`` is left undone: the run then ends
with 1, unless the script asks ``holdfast.distributed.is_lead()``.

*Covers:* init_process_group("holdfast").
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images of this example come with scikit-learn: pip install scikit-learn") from None

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "holdfast")
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
dataset = TensorDataset(images[:1500], torch.tensor(digits.target[:1500]))
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

steps = 0
for epoch in range(12):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1

model.eval()
with torch.no_grad():
    correct = model.module(images[1500:]).argmax(1) == torch.tensor(digits.target[1500:])
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(
    f"rank {dist.get_rank()}: {steps} steps, loss {loss.item():.4f}, accuracy {correct.float().mean():.4f} on images that it never saw,"
    f" weights {hashlib.sha256(weights).hexdigest()[:12]}"
)
dist.destroy_process_group()
