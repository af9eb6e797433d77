"""Replace failed workers, and let workers leave and join during training.

What you will see: the first job loses worker 1. The spare, which has the model loaded, computes its slices from the
same step on. The second job has no spare: a new process is started, receives the state from the memory of the other
workers, and joins some seconds later, between two steps. Then worker 0 receives SIGTERM, as on a preempted node, and
leaves. All jobs of the same length end with the same sha256.

Run:
    holdfast run -n 3 --spares 1 --inject kill:rank=1,step=20 examples/07_come_back.py
    holdfast run -n 3 --fabric gloo --respawn --inject kill:rank=1,step=20 --inject leave:rank=0,step=60 \
        --report out examples/07_come_back.py 150
    holdfast run -n 3 examples/07_come_back.py 150                    undisturbed: compare the sha256

*Covers:* spares, new workers, graceful leaving; the optimizer's momentum is part of the transferred state.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images of this example come with scikit-learn: pip install scikit-learn") from None

BATCH_SIZE = 120  # samples of one step, over all workers

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

session = holdfast.Session(model, optimizer)
for step in session.steps(train, batch_size=BATCH_SIZE, epochs=epochs):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))

if session.is_lead:
    print(f"{session.step} steps, loss {session.metrics['loss']:.4f}")
