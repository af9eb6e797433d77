"""torch.distributed with tensors on a device whose copies lag: ``dist_staged.py PLAY [ARGS]...``; see lagging.py.

``checks [NAMES]...``: the contract of dist_checks.py. ``train FOLDER [lost]``: DistributedDataParallel as in train_ddp.py;
the device of rank 1 is lost in the third step. ``waits FOLDER``: collectives of tensors that are computed late, with each
wait left out in turn.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import dist_checks
import torch
import torch.distributed as dist
import train_ddp
from lagging import LaggingDevice, lagging

from holdfast.comm import device as devices
from holdfast.comm.device import Wait

ROUNDS = 6
LENGTH = 500
HOW = {
    "wait": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "is_completed": lambda work: dist_checks.eventually(work.is_completed),
}
"""How a script learns that a collective has completed."""


def values(rank, number):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * number + rank))


def run(device, how):
    """Queue some rounds of work of two ranks; return what the device computes from the results."""
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor, whole = (device.allocate(4 * LENGTH * n).view(torch.float32) for n in (1, size))
    read = []
    for number in range(ROUNDS):
        mine = values(rank, number)
        device.compute(lambda mine=mine: tensor.copy_(mine))
        HOW[how](dist.all_reduce(tensor, async_op=True))
        device.compute(lambda: read.append(tensor.clone()))
        device.compute(lambda mine=mine: tensor.copy_(mine))
        HOW[how](dist.all_gather_into_tensor(whole, tensor, async_op=True))
        device.compute(lambda: read.append(whole.clone()))
        HOW[how](dist.irecv(tensor, 0) if rank else dist.isend(tensor, 1))
        device.compute(lambda: read.append(tensor.clone()))
    device.settle()
    return read


def expected():
    for number in range(ROUNDS):
        each = [values(rank, number) for rank in range(dist.get_world_size())]
        total = each[0].double()
        for term in each[1:]:
            total += term
        yield total.float()
        yield torch.cat(each)
        yield each[0]


def waits(folder):
    """Note for each way, and each wait left out, whether all results had the right bits."""
    said = {}
    for how in HOW:
        for skip in (None, Wait.COMPUTED, Wait.COPIED, Wait.ARRIVED):
            right = True
            for seed in range(1 if skip is None else 4):
                device = LaggingDevice(
                    torch.device("cpu"), 10 * seed + dist.get_rank(), {skip} - {None}, computes_late=True
                )
                devices.DEVICES["cpu"] = lambda _, device=device: device
                devices.device_of.cache_clear()
                got = run(device, how)
                right &= all(map(torch.equal, got, expected())) and len(got) == 3 * ROUNDS
                dist.barrier()
            said[f"{how} {skip.name if skip else 'nothing'}"] = right
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(said))


class Losing(LaggingDevice):
    """Is lost at one of the waits of the communication thread."""

    def wait(self, event, why):
        super().wait(event, why)
        if sum(why is Wait.COPIED for why in self.waits) == self.lost_at:
            message = "CUDA error: uncorrectable ECC error encountered"
            raise torch.AcceleratorError(message)


def train(folder, *lost):
    with lagging(longest_s=0.001) as made:
        if lost and dist.get_rank() == 1:
            devices.DEVICES["cpu"] = lose
        weights = train_ddp.train(naps=False)
    made[0].settle()
    torch.save({"weights": weights, "copies": made[0].copies}, Path(folder, f"{dist.get_rank()}.pt"))


def lose(device):
    made = Losing(device)
    made.lost_at = 9
    return made


def main(play, *args):
    if play == "checks":
        with lagging(longest_s=0.0005) as made:
            dist_checks.main(["holdfast", *args])
        assert made[0].copies
        made[0].settle()
        return
    torch.set_num_threads(1)
    dist.init_process_group("holdfast")
    {"waits": waits, "train": train}[play](*args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
