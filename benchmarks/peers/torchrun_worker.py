"""One worker under torchrun: plain DDP on Gloo, a checkpoint every ten steps, restarted from the newest one."""

from __future__ import annotations

import os
import time
from pathlib import Path

STARTED_S = time.monotonic()  # before torch: its import is most of a restart

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from digits_task import BATCH, Death, Diary, batches, die_with_parent, make_data, make_model, make_optimizer  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DistributedSampler  # noqa: E402

CHECKPOINT_EVERY = 10
CHECKPOINT = Path(os.environ["PEER_DIARY"], "checkpoint.pt")


def main() -> None:
    """Train until the process is ended, or another worker has failed."""
    die_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    diary = Diary(rank)
    diary.note("start", began_s=STARTED_S)
    try:
        train(rank, diary, Death(rank, diary))
    except RuntimeError as error:  # raised by DDP when a peer has failed
        diary.note("error", message=str(error)[:200])
        raise


def train(rank: int, diary: Diary, death: Death) -> None:
    """Resume from the newest checkpoint."""
    if not dist.is_initialized():  # Ray Train has done it
        dist.init_process_group("gloo")
    data, model = make_data(), make_model()
    optimizer = make_optimizer(model)
    step = load(model, optimizer)
    death.lurk_in_backward(model)
    optimizer.register_step_pre_hook(lambda *_: death.reach("optimizer"))
    wrapped = DistributedDataParallel(model)
    if death.may_come:  # torch's own hook, with a point to die at: after the all-reduce was submitted
        wrapped.register_comm_hook(None, lambda _, bucket: (allreduce_hook(None, bucket), death.reach("allreduce"))[0])
    diary.note("ready", step=step)
    for x, y in batches(data, DistributedSampler(data, shuffle=True), skip=step):
        death.look(step)
        optimizer.zero_grad()
        death.reach("forward")
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        step += 1
        diary.note(
            "step",
            step=step,
            committed=True,
            workers=dist.get_world_size(),
            samples=BATCH * dist.get_world_size(),
            own=BATCH,
        )
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            save(model, optimizer, step)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint atomically."""
    draft = CHECKPOINT.with_suffix(".draft")
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}, draft)
    draft.replace(CHECKPOINT)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the step to resume at."""
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    return state["step"]


if __name__ == "__main__":
    main()
