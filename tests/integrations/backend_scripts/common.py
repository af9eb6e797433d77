"""What every script of this folder needs: the backend's name, deaths at chosen calls, and a line with its weights.

Environment: ``FRAMEWORKS_BACKEND`` (default ``holdfast``), ``FRAMEWORKS_OUT``, a folder, and ``FRAMEWORKS_KILLS``, JSON
such as ``{"1": "backward:3"}``: rank 1 is killed when it begins its third backward pass. Any function of
``torch.distributed`` can be named in place of ``backward``.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

BACKEND = os.environ.get("FRAMEWORKS_BACKEND", "holdfast")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def die_as_planned():
    """Let this rank kill itself at the call that the plan names for it."""
    plan = json.loads(os.environ.get("FRAMEWORKS_KILLS", "{}")).get(str(RANK))
    if plan is None:
        return
    name, number = plan.split(":")
    where = torch.autograd if name == "backward" else dist
    call, left = getattr(where, name), iter(range(1, int(number)))

    def call_or_die(*args, **kwargs):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return call(*args, **kwargs)

    setattr(where, name, call_or_die)


def samples(count=48, features=8):
    """The same inputs and targets on all ranks."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(count, features, generator=source)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def small_model():
    """A small network with the same weights on all ranks."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def finished(model, **values):
    """Write the hash of the weights of this rank, and whatever else it found."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    out = Path(os.environ["FRAMEWORKS_OUT"], f"rank-{RANK}.json")
    out.write_text(json.dumps({"rank": RANK, "weights": digest.hexdigest()} | values))


torch.set_num_threads(1)
die_as_planned()
