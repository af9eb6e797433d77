"""Lose every worker at the same time, and resume from the newest checkpoint.

What you will see: both workers are killed in the same step, so no survivor can recover. The launcher restarts the
job with one new worker, which loads the newest intact checkpoint, computes both slices of every step, and ends with
the weights of the undisturbed run.

Run:
    holdfast run -n 2 --checkpoint-dir out/checkpoints --inject kill:rank=0,step=60 --inject kill:rank=1,step=60 \
        --report out examples/03_start_again.py
    holdfast run -n 2 examples/03_start_again.py                      undisturbed: compare the sha256

*Covers:* checkpoints, the launcher's restart, an optimizer with state (Adam).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the images of this example come with scikit-learn: pip install scikit-learn") from None

BATCH_SIZE = 128  # samples of one step, over all workers
EPOCHS = 8
CHECKPOINT_EVERY = 25  # steps

torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

session = holdfast.Session(model, optimizer, checkpoint_every=CHECKPOINT_EVERY)
for step in session.steps(train, batch_size=BATCH_SIZE, epochs=EPOCHS):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))

if session.is_lead:
    print(f"{session.step} steps, loss {session.metrics['loss']:.4f}")
