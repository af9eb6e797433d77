"""A new process takes the rank of a dead one in a plain DistributedDataParallel script.

What you will see: rank 0 dies, and the others continue. A spare, or a process that is started for it, becomes rank 0:
it receives weights, optimizer state and position from a survivor, between two steps. All four ranks end with the same
weights. The newcomer made fewer steps.

Run:
    holdfast run -n 4 --spares 1 --inject kill:rank=0,step=20 examples/09_replace_ddp_ranks.py
    holdfast run --fabric gloo -n 4 --respawn --inject kill:rank=0,step=20 examples/09_replace_ddp_ranks.py
    holdfast run -n 4 --inject kill:rank=2,step=20 examples/09_replace_ddp_ranks.py    three ranks are left

*Covers:* holdfast.distributed.register, alive.
"""

import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from holdfast.distributed import alive, register

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images of this example come with scikit-learn: pip install scikit-learn") from None

dist.init_process_group("holdfast")
step_s = 0.02 * dist.get_world_size()  # a larger model would take as long, and a newcomer needs some seconds to start
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
dataset = TensorDataset(images, torch.tensor(digits.target))
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

position = {"epoch": 0, "batch": 0}
register(model, optimizer, position)  # a newcomer returns from here in the middle of the training

steps = 0
for epoch in range(position["epoch"], 8):
    sampler.set_epoch(epoch)
    for batch, (x, y) in enumerate(loader):
        if (epoch, batch) < (position["epoch"], position["batch"]):
            continue  # the others have trained it
        position.update(epoch=epoch, batch=batch)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
        time.sleep(step_s)

weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}: {steps} steps, loss {loss.item():.4f}, alive {alive()},"
    f" weights {hashlib.sha256(weights).hexdigest()[:12]}"
)
dist.destroy_process_group()
