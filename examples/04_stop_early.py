"""Adam, a learning rate schedule, and an end when the training accuracy is good enough.

What you will see: a line every 20 steps, and a stop well before the last epoch, at the same step whichever worker dies.

Run:
    holdfast run -n 4 --inject kill:rank=3,step=30 examples/04_stop_early.py
    python examples/04_stop_early.py

*Covers:* a scheduler, step.log, step.stop, step.number, step.epoch.
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
EPOCHS = 40  # at most
STEPS = EPOCHS * 14  # 1797 images, the incomplete last mini-batch is dropped
GOOD_ENOUGH = 0.99  # training accuracy of one step

torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

session = holdfast.Session(model, optimizer, scheduler=scheduler)
for step in session.steps(train, batch_size=BATCH_SIZE, epochs=EPOCHS, drop_last=True):
    for x, y in step:
        logits = model(x)
        step.backward(F.cross_entropy(logits, y))
        step.log(accuracy=(logits.argmax(1) == y).float().mean())
    accuracy = session.metrics.get("accuracy", 0.0)  # of the previous step, over all workers
    if session.is_lead and step.number % 20 == 0:
        print(f"step {step.number}, epoch {step.epoch}: accuracy {accuracy:.4f}, lr {scheduler.get_last_lr()[0]:.6f}")
    if accuracy >= GOOD_ENOUGH:
        step.stop()  # stops after this step, at every worker

if session.is_lead:
    print(f"stopped after {session.step} of {STEPS} steps")
