"""One worker over torch's ``_reconfigure`` on Gloo (torch 2.14 or newer), as a script has to use it.

The parent reaps workers, so it learns of a death at once, and writes the new members to the standard input of the
survivors, as a line ``GENERATION RANK RANK ...``. A collective with a dead neighbour fails. Other survivors would wait for
its timeout, since neither ``abort`` of Gloo's group nor reconfiguring by the others wakes them: so a worker watches for
new members while it waits, and leaves the collective. Each member leaves its handle in a store, which is a process of its
own, as soon as it has one, so that nothing is waited for before reconfiguring. Then all agree on the newest step; a worker
that is behind, or new, receives the state of one that is not. The step that was in progress is computed again.

Environment variables: PEER_RANK, and PEER_STORE_PORT, the port of the store on this host.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_task import BATCH, Death, Diary, batches, die_with_parent, make_data, make_model, make_optimizer
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DistributedSampler

TIMEOUT = timedelta(seconds=10)
"""Of collectives, and of one try to reconfigure."""
POLL_S = 0.0002
"""How long a worker sleeps before it looks again whether a collective has ended, in seconds."""


class News:
    """The members of the newest generation, as the parent writes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.generation, self.members = -1, ()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            generation, *members = map(int, line.split())
            with self._changed:
                self.generation, self.members = generation, tuple(members)
                self._changed.notify_all()

    def later_than(self, generation: int) -> tuple[int, tuple[int, ...]]:
        """Wait for a generation later than this one; return the newest."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.generation > generation, timeout=60):
                sys.exit("the parent has not announced a new generation")
            return self.generation, self.members


class Worker:
    """The training of one worker, and what it does when a collective fails."""

    def __init__(self, rank: int) -> None:
        self.rank, self.news, self.generation, self.step = rank, News(), -1, 0
        self.members: tuple[int, ...] = ()
        self.diary = Diary(rank)
        self.diary.note("start")
        self.death = Death(rank, self.diary)
        self.data, self.model = make_data(), make_model()
        self.optimizer = make_optimizer(self.model)
        for parameter in self.model.parameters():  # so that the state has one shape from the start
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.death.lurk_in_backward(self.model)
        self.store = dist.TCPStore("127.0.0.1", int(os.environ["PEER_STORE_PORT"]), is_master=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("group", self.store), rank=rank, world_size=1, timeout=TIMEOUT,
            enable_reconfigure=True,
        )  # fmt: skip
        self._leave_handle()

    def _leave_handle(self) -> None:
        self.store.set(f"handle/{self.rank}", dist._get_reconfigure_handle())

    def join(self) -> None:
        """Reconfigure the group for the newest generation; return when all its members have the same state."""
        print("ready", flush=True)
        self._regroup(new=True)

    def recover(self) -> None:
        """Do the same after a failure."""
        self._regroup(new=False)

    def _regroup(self, *, new: bool) -> None:
        while True:
            self.generation, self.members = self.news.later_than(self.generation)
            self.diary.note("configure")
            try:
                self._reconfigure()
                self._share(new=new)
            except RuntimeError:  # another member has died meanwhile, and the parent announces it
                continue
            self.diary.note("configured")
            return

    def _reconfigure(self) -> None:
        handles = [self.store.get(f"handle/{rank}").decode() for rank in self.members]
        dist._reconfigure(self.generation, handles, timeout=TIMEOUT).wait()
        self._leave_handle()

    def _share(self, *, new: bool) -> None:
        steps = torch.zeros(len(self.members), dtype=torch.int64)
        steps[self.members.index(self.rank)] = -1 if new else self.step
        dist.all_reduce(steps)
        newest = int(steps.max())
        if newest < 0:  # all are new
            return
        if int(steps.min()) < newest:
            state = self._state()
            dist.broadcast(state, src=int(steps.argmax()))
            self._take(state)
            self.step = newest

    def _state(self) -> torch.Tensor:
        momenta = [self.optimizer.state[p]["momentum_buffer"].flatten() for p in self.model.parameters()]
        buffers = [buffer.flatten().float() for buffer in self.model.buffers()]
        return torch.cat([parameters_to_vector(self.model.parameters()).detach(), *momenta, *buffers])

    def _take(self, state: torch.Tensor) -> None:
        with torch.no_grad():
            count = sum(p.numel() for p in self.model.parameters())
            vector_to_parameters(state[:count], self.model.parameters())
            at = count
            momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
            for tensor in [*momenta, *self.model.buffers()]:
                tensor.copy_(state[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()

    def train(self) -> None:
        """Train until the process is ended."""
        while True:
            sampler = DistributedSampler(
                self.data, len(self.members), self.members.index(self.rank), shuffle=True, drop_last=True
            )
            for x, y in batches(self.data, sampler, skip=self.step):
                if not self._train_step(x, y):
                    break

    def _wait(self, work: dist.Work) -> None:
        while not work.is_completed():
            if self.news.generation > self.generation:
                raise RuntimeError("the members have changed")
            time.sleep(POLL_S)
        work.wait()

    def _train_step(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Train on one mini-batch; return False if the group was reconfigured instead."""
        try:
            if self.news.generation > self.generation:  # a worker joins
                raise RuntimeError("the members have changed")
            self.death.look(self.step)
            self.optimizer.zero_grad()
            self.death.reach("forward")
            F.cross_entropy(self.model(x), y).backward()
            gradients = torch.cat([p.grad.flatten() for p in self.model.parameters()])
            work = dist.all_reduce(gradients, async_op=True)
            self.death.reach("allreduce")
            self._wait(work)
        except RuntimeError as error:
            self.diary.note("error", message=str(error)[:200])
            self.recover()
            return False
        gradients /= len(self.members)
        at = 0
        for p in self.model.parameters():
            p.grad.copy_(gradients[at : at + p.numel()].view_as(p))
            at += p.numel()
        self.death.reach("optimizer")
        self.optimizer.step()
        self.step += 1
        workers = len(self.members)
        self.diary.note(
            "step", step=self.step, committed=True, workers=workers, samples=BATCH * workers, own=BATCH
        )  # fmt: skip
        return True


def main() -> None:
    """Join, and train."""
    die_with_parent()
    torch.set_num_threads(1)
    if os.environ["PEER_RANK"] == "store":
        store = dist.TCPStore("127.0.0.1", int(os.environ["PEER_STORE_PORT"]), is_master=True, wait_for_workers=False)
        while store is not None:
            time.sleep(60)
    worker = Worker(int(os.environ["PEER_RANK"]))
    worker.join()
    worker.train()


if __name__ == "__main__":
    main()
