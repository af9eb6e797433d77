"""One replica group of one worker under torchft, on Gloo: the loop of torchft's own ``train_ddp.py``.

The additions only record events. TORCHFT_LIGHTHOUSE gives the lighthouse, REPLICA_GROUP_ID and NUM_REPLICA_GROUPS the
worker, as there.
"""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_task import BATCH, Death, Diary, batches, die_with_parent, make_data, make_model, make_optimizer
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

GLOO_TIMEOUT = timedelta(seconds=float(os.environ.get("PEER_GLOO_TIMEOUT_S", "5")))
MANAGER_TIMEOUT = timedelta(seconds=30)
"""Both as in ``train_ddp.py``."""


class NotedGloo(ProcessGroupGloo):
    """Gloo that records when it is rebuilt, with a point to die at: after the all-reduce was submitted."""

    diary: Diary
    death: Death

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Rebuild the group."""
        self.diary.note("configure")
        super().configure(*args, **kwargs)
        self.diary.note("configured")

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """Sum."""
        work = super().allreduce(*args, **kwargs)
        self.death.reach("allreduce")
        return work


class NotedManager(Manager):
    """A manager that records when it receives an error, and remembers its last vote."""

    diary: Diary
    committed = False

    def report_error(self, e: Exception) -> None:
        """Record the first error of a step."""
        if self.errored() is None:
            self.diary.note("error", message=str(e)[:200])
        super().report_error(e)

    def should_commit(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the optimizer may run."""
        self.committed = super().should_commit(*args, **kwargs)
        return self.committed


class RepairedDDP(DistributedDataParallel):
    """torchft's DDP with a repaired hook.

    If Gloo fails while a worker waits in the all-reduce, the hook of 0.2.0 ends in ``assert fut._fut``, and with it
    every survivor. The manager has recorded the error by then, so the gradients do not matter: the step is not
    committed.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        done = getattr(work.get_future(), "_fut", None)
        if done is None:
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
        return done


def main() -> None:
    """Train until the process is ended."""
    die_with_parent()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rank, workers = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    diary = Diary(rank)
    death = Death(rank, diary)
    diary.note("start")
    NotedGloo.diary, NotedGloo.death, NotedManager.diary = diary, death, diary
    data, model = make_data(), make_model()
    plain = make_optimizer(model)
    death.lurk_in_backward(model)
    plain.register_step_pre_hook(lambda *_: death.reach("optimizer"))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = NotedManager(
        pg=NotedGloo(timeout=GLOO_TIMEOUT),
        min_replica_size=1,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), plain.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": model.state_dict(), "optim": plain.state_dict()},
        replica_id=f"digits_{rank}",
        timeout=MANAGER_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    wrapped = (RepairedDDP if os.environ.get("PEER_REPAIR", "1") == "1" else DistributedDataParallel)(manager, model)
    optimizer = Optimizer(manager, plain)
    sampler = DistributedSampler(
        data, replica_rank=rank, num_replica_groups=workers, group_rank=0, num_replicas=1, shuffle=True
    )
    for x, y in batches(data, sampler):
        train_step(manager, wrapped, optimizer, x, y, diary, death)


def train_step(
    manager: NotedManager,
    model: torch.nn.Module,
    optimizer: Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    diary: Diary,
    death: Death,
) -> None:
    """Train on one mini-batch and record the result."""
    death.look(manager.current_step())
    optimizer.zero_grad()  # requests a quorum
    death.reach("forward")
    F.cross_entropy(model(x), y).backward()
    optimizer.step()  # runs only if the manager found no error
    diary.note(
        "step",
        step=manager.current_step(),
        committed=manager.committed,
        workers=manager.num_participants(),
        samples=BATCH * manager.num_participants(),
        own=BATCH,
        quorum=manager._quorum_id,
        took_part=manager.is_participating(),
    )


if __name__ == "__main__":
    main()
