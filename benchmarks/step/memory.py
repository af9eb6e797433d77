"""How much memory training takes: bytes per parameter with Adam, as the system counts them, beside DDP.

    python benchmarks/step/memory.py [--workers 2] [--slices 1 2 8] [--systems ddp ddp-views shared messages] [--json FILE]

=========  =========================================================================================================
system     what runs
=========  =========================================================================================================
alone      the plain loop, without communication: the limit; measured if it is named
ddp        DistributedDataParallel on Gloo; several slices are accumulated under ``no_sync``
ddp-views  the same with ``gradient_as_bucket_view=True``
shared     ``holdfast.Session`` in ``--order tree``, on one host; the result of the all-reduce is shared by all workers
messages   the same without shared memory, as between hosts
=========  =========================================================================================================

Each worker reads its proportional set size (``Pss`` of ``/proc/self/smaps_rollup``) before it makes the model, and after
the last of four steps; memory that several workers map counts for each in part. Reported is the growth of all workers,
by worker and parameter. ``counted`` is what ``holdfast_lab.memory`` counts from the tensors, by worker and
parameter, with the shared result divided among the workers. The model is an MLP whose activations take next to nothing.
The C library is told to give back each megabyte that is freed; otherwise it keeps gradients that are gone, in all systems.

The defaults take two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from common import command_line, environment, pss_bytes, table, write_json
from torch import nn

SYSTEMS = ("ddp", "ddp-views", "shared", "messages")
ALONE = "alone"
WIDTH, LAYERS, STEPS = 2048, 6, 4
JOB_S = 600.0
"""Time limit of a job, in seconds."""


def make_model() -> nn.Sequential:
    """Return the model: 25 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


# ---------------------------------------------------------------------------------------------
# The workers


def train_plainly(slices: int, data: torch.Tensor, system: str) -> dict[str, float]:
    """Train as a process of DDP, or without communication; return what the process has grown by."""
    torch.distributed.init_process_group("gloo")  # without communication, too: the same libraries, and a barrier
    torch.distributed.barrier()
    before = pss_bytes()
    model: Any = make_model()
    if system != ALONE:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=system == "ddp-views")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number in range(slices):
            is_last = system == ALONE or number == slices - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                F.mse_loss(model(data[:1]), data[:1]).backward()
        optimizer.step()
    torch.distributed.barrier()  # all have what they need, and none has left
    after = pss_bytes()
    torch.distributed.barrier()
    return {"bytes": after - before}


def train_holdfast(slices: int, data: torch.Tensor) -> dict[str, float]:
    """Train in a session; return what the process has grown by, and what Holdfast counts."""
    import holdfast
    from holdfast_lab.memory import memory_in_use

    before = pss_bytes()
    model = make_model()
    of_all = slices * int(os.environ["HOLDFAST_WORKERS"])
    session = holdfast.Session(model, torch.optim.Adam(model.parameters()), order="tree", slices=of_all)
    dataset = torch.utils.data.TensorDataset(data[:of_all].repeat(STEPS + 1, 1))
    after, found = 0, {}
    for step in session.steps(dataset, of_all, 1):
        if step.number == STEPS:  # all workers are in this step, and each has what it needs
            after = pss_bytes()
            assert session._trainable.whole is not None
            assert session._job is not None
            assert session._job.loops.sum is not None
            found = memory_in_use(session._trainable.whole, session._job.loops.sum)
        for (x,) in step:
            step.backward(F.mse_loss(model(x), x))
    counted = sum(found.values()) - found["result"] * (1 - 1 / session.world_size)
    return {"bytes": after - before, "counted": counted}


def work(system: str, slices: int, folder: Path) -> None:
    """Train as one worker, and leave the result in ``folder``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all workers have the same samples
    data = torch.randn(64, WIDTH)
    layer = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    F.mse_loss(layer(data[:1]), data[:1, :4]).backward()
    optimizer.step()  # torch imports much for its first step
    is_plain = system == ALONE or "ddp" in system
    found = train_plainly(slices, data, system) if is_plain else train_holdfast(slices, data)
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


# ---------------------------------------------------------------------------------------------
# The jobs


def measure(system: str, slices: int, workers: int) -> dict[str, float]:
    """Run a job; return bytes by parameter and worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [__file__, "--work", system, "--slices", str(slices), "--folder", name]
        env = environment(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
        if "ddp" in system or system == ALONE:
            command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *own]
        else:
            command = ["holdfast", "run", "-n", str(workers), "--fabric", "gloo", "--no-preload", *own]
            env |= {"HOLDFAST_SHARED_BYTES": "0"} if system == "messages" else {}
        done = subprocess.run(
            [sys.executable, "-m", *command], env=env, capture_output=True, text=True, timeout=JOB_S, check=False
        )
        found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        if done.returncode or len(found) != workers:
            raise SystemExit(f"{system} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    numbers = sum(p.numel() for p in make_model().parameters())
    result = {what: sum(one[what] for one in found) / workers / numbers for what in found[0]}
    print(f"{system}, {slices} slices a worker: {result}", file=sys.stderr)
    return result


def main() -> None:
    """Measure all systems, and print a table."""
    parser = command_line(
        __doc__, systems=([*SYSTEMS], None, (*SYSTEMS, ALONE)), slices=([1, 2, 8], "slices of each worker"), workers=2
    )
    parser.add_argument("--work", choices=(*SYSTEMS, ALONE), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.slices[0], given.folder)
        return
    results: list[dict[str, Any]] = [
        {"system": system, "slices": slices, **measure(system, slices, given.workers)}
        for slices in given.slices
        for system in given.systems
    ]
    rows = [
        [f"{one['slices']}", one["system"], f"{one['bytes']:.2f}", f"{one['counted']:.2f}" if "counted" in one else ""]
        for one in results
    ]
    title = f"{given.workers} workers, bytes per parameter and worker"
    print(table(title, ["slices", "system", "Pss", "counted"], rows))
    write_json(given.json, workers=given.workers, results=results)


if __name__ == "__main__":
    main()
