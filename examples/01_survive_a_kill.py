"""Train a small CNN on handwritten digits, and lose nothing when workers are killed.

What you will see: two of four workers die, and the survivors compute their slices of the very same mini-batch.
The last lines give the accuracy and a sha256 of the weights: the same as without the kills.

Run:
    holdfast run -n 4 --inject kill:rank=1,step=40 --inject kill:rank=2,step=90 examples/01_survive_a_kill.py
    holdfast run -n 4 examples/01_survive_a_kill.py                   undisturbed: compare the sha256
    mpirun --with-ft ulfm --oversubscribe -n 4 python examples/01_survive_a_kill.py    without the launcher
    python examples/01_survive_a_kill.py                              one worker

*Covers:* Session, session.steps, step.backward, session.log, session.is_lead.
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
EPOCHS = 12  # 12 steps each
HELD_OUT = 297  # images that are not trained on

torch.set_num_threads(1)  # result bits may depend on the number of threads
torch.set_deterministic_debug_mode("error")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels)
train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Dropout(0.25),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

session = holdfast.Session(model, optimizer)
for step in session.steps(train, batch_size=BATCH_SIZE, epochs=EPOCHS):
    for x, y in step:  # the slices assigned to this worker
        step.backward(F.cross_entropy(model(x), y))

model.eval()
with torch.no_grad():
    accuracy = (model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).float().mean().item()
session.log(accuracy=accuracy)
if session.is_lead:
    print(f"{session.step} steps, accuracy {accuracy:.4f} on {HELD_OUT} images that it never saw")
