"""Rebuild the whole application after a failure, in the surviving processes (MPI's Reinit proposal).

What you will see: worker 1 is killed. The survivors leave the loop, release the model, the optimizer and the session,
and call main() once more, in the same processes; the state comes from a snapshot taken at the failure. The report shows
how long the snapshot, the rebuild and the loading took. The weights are those of the undisturbed run.

Run:
    holdfast run -n 4 --strategy reinit --inject kill:rank=1,step=40 --report out examples/08_reinit.py
    holdfast run -n 4 --strategy reinit --reinit-from root --inject kill:rank=1,step=40 examples/08_reinit.py
    holdfast run -n 4 examples/08_reinit.py                           undisturbed: compare the sha256

*Covers:* holdfast.reinit, the strategy reinit.
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


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    train = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    session = holdfast.Session(model, optimizer)
    for step in session.steps(train, batch_size=BATCH_SIZE, epochs=EPOCHS):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))

    if session.is_lead:
        print(f"{session.step} steps, loss {session.metrics['loss']:.4f}")


torch.set_num_threads(1)
torch.set_deterministic_debug_mode("error")
holdfast.reinit(main)
