"""Several GPUs, on one node or more: exactness, kills, bytes, and the time of a step beside DDP on NCCL.

    python benchmarks/gpu_cluster.py                                                          # one node, all its GPUs
    python benchmarks/gpu_cluster.py --nnodes 2 --node-rank K --rdzv node0:29500 --nic-gbps 400   # on each of two nodes
    python benchmarks/gpu_cluster.py --device cpu -n 2                                        # does the script work?

**It has not been run on GPUs yet.** It prints what is expected beside what it measures. It writes ``benchmarks/results/gpu-cluster.json``
on the first node, in which ``python docs/generate.py`` finds its rows; with ``--device cpu``, ``out/gpu-on-cpu/cpu-cluster.json``.

What is expected for B bytes of gradients on H nodes: both systems send 2 B (H - 1) / H from each node, which takes that by the
bandwidth of its network cards (``--nic-gbps``, for all cards of a node together). Holdfast sends it from host memory, by
``--fabric gloo`` and ``--order tree``; NCCL sends it from the GPUs. So Holdfast's step is expected to be longer, by at least
the copies to host memory and back; by how much is what this measures.

Exit code: 0 if everything holds, 1 if not, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpus.jobs import TRAIN, Job, ended_in_all, killed, state_of, whole
from gpus.results import COMPLETE, ROOT, Results, SectionFailed, Where, commit_of, facts_of, path_of

PHASES = ("forward", "backward", "allreduce", "optimizer")
MODELS = {"25M": 40, "350M": 24, "1B": 12}
"""Steps of a run."""
BATCH_OF_ONE = 4
"""Samples of a worker in a step."""


@dataclass(slots=True)
class Cluster:
    """The nodes.

    Args:
        nodes: How many.
        here: The number of this one.
        host: Address of the first.
        port: A free port there; each job takes the next.
        workers: Of each node.
    """

    nodes: int
    here: int
    host: str
    port: int
    workers: int

    @property
    def all_workers(self) -> int:
        """Workers of a job."""
        return self.nodes * self.workers

    def holdfast(self) -> list[object]:
        """Return the options of the next job of Holdfast: all nodes run the same jobs in the same order."""
        self.port += 1
        if self.nodes == 1:
            return []
        return ["--nnodes", self.nodes, "--node-rank", self.here, "--rdzv", f"holdfast://{self.host}:{self.port}"]

    def ranks(self) -> list[dict[str, str]]:
        """Return what the workers of this node find in their environment, in the next job of DDP."""
        self.port += 1
        meeting = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "WORLD_SIZE": str(self.all_workers)}
        first = self.here * self.workers
        return [{**meeting, "RANK": str(first + k), "LOCAL_RANK": str(k)} for k in range(self.workers)]


def main() -> None:
    """Run all of it."""
    options = parse()
    where = Where(options.device, options.size == "tiny")
    host, _, port = options.rdzv.rpartition(":")
    cluster = Cluster(options.nnodes, options.node_rank, host, int(port), options.n)
    facts = facts_of("a cluster of GPUs", options.device, options.commit)
    facts["cards"] = cluster.all_workers if where.is_gpu else 0
    folder = options.out if options.node_rank == 0 else Path(tempfile.mkdtemp())  # the first node's file has it all
    results = Results(path_of(folder, options.device, "cluster"), facts)
    ended = COMPLETE
    try:
        exact(where, cluster, results)
        for model, steps in {"tiny-mlp": 12}.items() if where.tiny else MODELS.items():
            times(where, cluster, results, model, steps, options.nic_gbps)
    except SectionFailed as error:
        ended = str(error)
    except Exception as error:  # what was measured is kept
        traceback.print_exc()
        ended = f"{type(error).__name__}: {error}"
    if ended != COMPLETE:
        print(ended, file=sys.stderr)
        results.failed.append("the benchmark")
        results.figures["not complete"] = ended.splitlines()[0]
    results.write(ended)
    sys.exit(bool(results.failed))


def parse() -> argparse.Namespace:
    """Read the command line; exit code 2 if it cannot be carried out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument(
        "--rdzv", default="127.0.0.1:29500", metavar="HOST:PORT", help="of the first node; about 20 ports are used"
    )
    parser.add_argument("-n", type=int, help="workers of each node; default: its GPUs")
    parser.add_argument("--nic-gbps", type=float, help="bandwidth of a node's network cards together, Gbit/s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), help="default: full on GPUs, tiny on a CPU")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--commit", help="the commit that is run, where there is no git")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this process cannot use CUDA: run it on a machine with GPUs, or try the script with --device cpu")
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node-rank must be from 0 to {options.nnodes - 1}, got {options.node_rank}")
    if not options.rdzv.rpartition(":")[2].isdecimal():
        parser.error(f"--rdzv must be HOST:PORT, got {options.rdzv}")
    head, changed = commit_of()
    if options.device == "cuda" and not options.commit and (changed or not head):
        parser.error("figures belong to a commit: commit the changes in this checkout first, or name it by --commit")
    options.commit = options.commit or head or "unknown"
    options.n = options.n or (torch.cuda.device_count() if options.device == "cuda" else 2)
    options.size = options.size or ("full" if options.device == "cuda" else "tiny")
    on_gpus = options.device == "cuda"
    options.out = options.out or (ROOT / "benchmarks" / "results" if on_gpus else ROOT / "out" / "gpu-on-cpu")
    if options.n * options.nnodes < 2:
        parser.error("one worker in all has no other to exchange gradients with: give -n 2 or more")
    return options


def job(where: Where, cluster: Cluster, model: str, *words: object, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a job of Holdfast on all nodes; return its report."""
    workers = cluster.all_workers
    given = ("--batch", BATCH_OF_ONE * workers, "--slices", workers, *words)
    options = ("--order", "tree", *cluster.holdfast())
    return Job(where, model, cluster.workers, words=given, faults=faults, options=options).run()


def exact(where: Where, cluster: Cluster, results: Results) -> None:
    """Compare runs with kills in every phase with an undisturbed one."""
    model, last = ("tiny-mlp" if where.tiny else "transformer"), cluster.all_workers - 1
    undisturbed = state_of(job(where, cluster, model, "--deterministic"))
    for phase in PHASES[2:3] if where.tiny else PHASES:
        report = job(where, cluster, model, "--deterministic", faults=(f"kill:rank={last},step=4,phase={phase}",))
        equal = state_of(report) == undisturbed and whole(report)
        landed = killed(report) == [last]
        recover_ms = [1e3 * f["recover_s"] for f in report["failures"] if f["recover_s"] is not None]
        bits = "equal bits" if equal else "other bits, or lost samples"
        text = (
            f"{bits}; next commit after {', '.join(f'{ms:.0f}' for ms in recover_ms)} ms, expected: equal, below 500 ms"
        )
        results.check(f"{cluster.all_workers} workers, one killed in {phase}", equal and landed, text)


def times(where: Where, cluster: Cluster, results: Results, model: str, steps: int, nic_gbps: float | None) -> None:
    """Compare bytes and time of a step."""
    report = job(where, cluster, model, "--steps", steps)
    ours, bytes_of_gradients = report["metrics"], 4.0 * report["parameters"]
    peer = ddp(where, cluster, model, steps)
    ratio = ours["step_ms"] / peer["step_ms"]
    name = f"{model}, nodes x workers {cluster.nodes} x {cluster.workers}"
    text = f"Holdfast {ours['step_ms']:.1f} ms, DDP {peer['step_ms']:.1f} ms: {ratio:.2f} times"
    results.figure(f"{name}, step", text)
    if cluster.nodes == 1:
        results.skip(f"{name}, bytes", "a single node sends none")
        return
    expected = 2 * bytes_of_gradients * (cluster.nodes - 1) / cluster.nodes
    nic = (
        f"{8e3 * expected / (nic_gbps * 1e9):.1f} ms by the network cards"
        if nic_gbps
        else "give --nic-gbps for its time"
    )
    for system, figures in (("Holdfast", ours), ("DDP", peer)):
        text = f"{figures['sent_bytes'] / 1e6:.1f} MB, expected {expected / 1e6:.1f} MB, {nic}"
        results.figure(f"{name}, {system}: a node sends in a step", text)


def ddp(where: Where, cluster: Cluster, model: str, steps: int) -> dict[str, float]:
    """Run DDP on all nodes; return the figures of the first worker of this node."""
    words = ("--device", where.device, "--ddp", "--steps", steps, "--batch", BATCH_OF_ONE * cluster.all_workers)
    command = [sys.executable, *map(str, (TRAIN, model, *words))]
    said = ended_in_all([(command, rank) for rank in cluster.ranks()])
    found: dict[str, float] = json.loads(said[0])
    return found


if __name__ == "__main__":
    main()
