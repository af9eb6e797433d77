"""Continue without the failed worker's share of the step: no time is lost, some samples are.

What you will see: the survivors finish the step in which a worker dies with the gradients they have. The accuracy
hardly changes, the sha256 of the weights does; report.json lists the lost samples by id under "lost".

Run:
    holdfast run -n 4 --inject kill:rank=1,step=40 --report out examples/02_forward.py
    python -c "import json; print(json.load(open('out/report.json'))['lost'])"

*Covers:* a setting given in the script (it takes precedence over --strategy), session.metrics, session.world_size.
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
EPOCHS = 10

torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

session = holdfast.Session(model, optimizer, strategy="forward", bucket_bytes=4096)
for step in session.steps(train, batch_size=BATCH_SIZE, epochs=EPOCHS):
    for x, y in step:
        logits = model(x)
        step.backward(F.cross_entropy(logits, y))
        step.log(accuracy=(logits.argmax(1) == y).float().mean())  # mean over the samples of the step

if session.is_lead:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in session.metrics.items())
    print(f"{session.step} steps, {session.world_size} workers alive; the last step: {figures}")
