"""The rows of the table. Each says what is measured, beside which peers with which settings, by which script."""

from __future__ import annotations

from rows import readers
from rows.row import Peer, Row

TWO = ("--workers", "2")
GLOO = Peer("DDP on Gloo", settings="defaults: buckets of 25 MiB, overlapped with the backward pass")
TORCHFT = Peer(
    "torchft", "peers", "torchft", "its DistributedDataParallel and Optimizer on Gloo, lighthouse at defaults"
)
GIGABYTE = ("--rounds", "7", "--ways")
STEP_SYSTEMS = ("--systems", "alone", "ddp-gloo", "holdfast", "torchft")
"""For a step torchft's timeouts do not matter: none of them passes."""


_NOISE = "the time of this machine's {} varies more than the two differ: performance-checkpoints.md"
WHY = {
    "save": dict.fromkeys(("safetensors", "torch", "dcp", "torch-checkpointing"), _NOISE.format("disk")),
    "load": {
        "safetensors": "it checks no byte, Holdfast every one: performance-checkpoints.md",
        "torch, mapped": _NOISE.format("memory"),
    },
}


def _sum(numbers: int, rounds: int) -> tuple[tuple[str, ...], ...]:
    ways = ("--ways", "gloo", "openmpi", "shared", "memcpy")
    return (("allreduce/sum.py", *TWO, "--numbers", str(numbers), *ways, "--rounds", str(rounds)),)


def _all_reduce(name: str, numbers: int) -> Row:
    return Row(
        name, f"all-reduce of {numbers:,} float32, 2 workers of one host", "ms", _sum(numbers, 21), readers.all_reduce,
        {"gloo": Peer("Gloo"), "openmpi": Peer("Open MPI", package="openmpi", settings="fault-tolerant mode, as Holdfast's")},
        _sum(1000, 2), limit="one copy of as many bytes", limit_s=60,
        why={"openmpi": "below a million numbers most of it is two barriers: performance-step.md"},
    )  # fmt: skip


def _step(name: str, model: str, what: str, limit_s: float) -> Row:
    start = ("step/step_time.py", "--models", model, *TWO, *STEP_SYSTEMS)
    return Row(
        name, f"step of {what}, 2 workers", "ms", ((*start, "--rounds", "9"),), readers.step("holdfast"),
        {"ddp-gloo": GLOO, "torchft": TORCHFT}, ((*start, "--rounds", "1", "--steps", "1"),),
        limit="the loop without communication", limit_s=limit_s, long=((*start, "--rounds", "40"),),
    )  # fmt: skip


def _wide(model: str, what: str) -> Row:
    start = ("step/step_time.py", "--models", model, "--workers", "4", *STEP_SYSTEMS)
    return Row(
        f"step-{model}-4", f"step of {what}, 4 workers", "ms", ((*start, "--rounds", "20"),), readers.step("holdfast"),
        {"ddp-gloo": GLOO, "torchft": TORCHFT}, ((*start, "--rounds", "1", "--steps", "1"),),
        limit="the loop without communication", limit_s=300, only_long=True,
    )  # fmt: skip


def _split(kind: str, theirs: str, peer: Peer) -> Row:
    start = ("step/split.py", "--kinds", kind, "--models", "mlp", *TWO)
    return Row(
        f"split-{kind}", f"step of an 8.5 M MLP, {kind}, 2 workers", "ms", ((*start, "--rounds", "20"),),
        readers.step(f"holdfast-{kind}"), {theirs: peer}, ((*start, "--rounds", "1", "--steps", "1"),), limit_s=200,
        only_long=True,
    )  # fmt: skip


def _slices() -> Row:
    systems = ("--systems", "alone", "ddp-gloo", "ddp-accumulate", "holdfast-slices")
    start = ("step/step_time.py", "--models", "mlp", *TWO, "--slices", "8", *systems)
    return Row(
        "step-slices", "step of an 8.5 M MLP in 8 slices, 2 workers", "ms", ((*start, "--rounds", "9"),),
        readers.step("holdfast-slices"),
        {
            "ddp-gloo": Peer("DDP on Gloo, no slices", settings="the same mini-batch in one pass"),
            "ddp-accumulate": Peer("DDP on Gloo", settings="4 micro-batches a worker under no_sync"),
        },
        ((*start, "--rounds", "1", "--steps", "1"),), limit="the loop without communication", limit_s=150,
        why={"ddp-gloo": "it makes one pass over its mini-batch, Holdfast one for each slice: performance-slices.md"},
        long=((*start, "--rounds", "40"),),
    )  # fmt: skip


def _hosts() -> Row:
    start = ("step/hosts.py", "--hosts", "2", "--systems", "ddp-gloo", "holdfast", "wire")
    return Row(
        "hosts", "step of an 8.5 M MLP between 2 hosts, links of 1 Gbit/s", "ms",
        ((*start, "--rounds", "3", "--steps", "8"),), readers.hosts, {"ddp-gloo": GLOO},
        ((*start, "--model", "cnn", "--rounds", "1", "--steps", "1"),),
        limit="its bytes over the link, both ways at once", limit_s=180,
        why={"ddp-gloo": "two exchanges a bucket, and a barrier; two workers a host take 0.83: performance-step.md"},
        long=((*start, "--rounds", "10", "--steps", "12"),),
    )  # fmt: skip


def _memory() -> Row:
    start = ("step/memory.py", *TWO, "--systems", "alone", "ddp", "ddp-views", "shared")
    return Row(
        "memory", "memory by parameter and worker, Adam, 2 workers of one host", "bytes",
        ((*start, "--slices", *"11111"),), readers.memory,
        {
            "ddp": Peer("DDP on Gloo"),
            "ddp-views": Peer("DDP on Gloo, views", settings="gradient_as_bucket_view=True"),
        },
        (("step/memory.py", *TWO, "--systems", "ddp", "shared", "--slices", "1"),), limit="the loop without communication",
        limit_s=210, why={"ddp-views": "the workers of a host share one more copy of the sum: performance-step.md"},
    )  # fmt: skip


def _kill() -> Row:
    ours = ("recovery/kill.py", "--systems", "rollback,torchft-tuned,torchrun,reconfigure,ray")
    tuned = "heartbeat timeout 500 ms and the best of the join timeouts 100, 200, 500, 1000 and 2000 ms; its defaults take longer"
    return Row(
        "kill", "from a SIGKILL to the next commit, 4 workers", "ms",
        ((*ours, "--kills", "6"),), readers.kill,
        {
            "torchft-tuned": Peer("torchft", "peers", "torchft", tuned),
            "torchrun": Peer("torchrun", "peers", settings="all workers restarted, checkpoint every 10 steps"),
            "reconfigure": Peer("torch's _reconfigure", "torch", settings="on Gloo; deaths are announced by the parent at once"),
            "ray": Peer("Ray Train", "ray", "ray", "health checks every 0.1 s instead of 2 s, checkpoint every 10 steps"),
        },
        (("recovery/kill.py", "--systems", "rollback", "--kills", "1", "--workers", "2"),), limit="one step", limit_s=600,
        long=((*ours, "--kills", "24"),),
    )  # fmt: skip


def _join() -> Row:
    return Row(
        "join", "how long a newcomer holds 3 workers, 100 MB of state", "ms",
        (("recovery/join.py", "--kinds", "whole,torchft", "--kills", "6"),), readers.join,
        {"torchft": Peer("torchft", "peers", "torchft", "heartbeat timeout 500 ms, join timeout 200 ms")},
        (("recovery/join.py", "--kinds", "whole", "--kills", "1", "--megabytes", "1", "--workers", "2"),),
        limit="one copy of the state", limit_s=180,
        why={"torchft": "half is memory for gradients of one more worker, most of the rest the transfer of the state: performance-recovery.md"},
    )  # fmt: skip


def _store(part: str, what: str, limit: tuple[str, str], limit_s: float) -> Row:
    ways = ("holdfast", "safetensors", "torch", "dcp", "torch-checkpointing", "orbax")
    peers = {
        "safetensors": Peer("safetensors", package="safetensors", settings="one file, then fsync; no checksum"),
        "torch": Peer("torch.save" if part == "save" else "torch.load", settings="the whole state in one file, then fsync"),
        "dcp": Peer("DCP", settings="a thread for each core"),
        "torch-checkpointing": Peer("torch-checkpointing", "peers", "torch_checkpointing", "a thread for each core, no O_DIRECT (it fails on ext4), no process, then fsync"),
        "orbax": Peer("Orbax", "peers", "orbax-checkpoint", "StandardCheckpointer"),
    }  # fmt: skip
    if part == "load":
        ways = (*ways, "torch, mapped")
        peers["torch, mapped"] = Peer("torch.load, mapped", settings="mmap=True")
    start = ("checkpoint/save_load.py", "--parts", part, *GIGABYTE, *ways)
    tiny = ("checkpoint/save_load.py", "--parts", part, "--bytes", "1e6", "--layers", "2", "--rounds", "1")
    return Row(
        part, what, "s", (start,), readers.store(part, limit[0]), peers,
        ((*tiny, "--ways", "holdfast", "safetensors", "dcp"),), limit=limit[1], limit_s=limit_s,
        why=WHY[part],
        long=(("checkpoint/save_load.py", "--parts", part, "--rounds", "20", "--ways", *ways),),
    )  # fmt: skip


def _start_job() -> Row:
    imports = ("launch/start.py", "--names", "import torch", "--rounds")
    return Row(
        "start", "from the command to the first step, 4 workers", "s",
        (("launch/start_job.py", "--rounds", "6"), (*imports, "7")), readers.start_job,
        {"torchrun": Peer("torchrun", settings="DDP on Gloo, --standalone")},
        (("launch/start_job.py", "--rounds", "1", "--workers", "2"),), limit="one import of torch", limit_s=350,
        long=(("launch/start_job.py", "--rounds", "20"), (*imports, "20")),
    )  # fmt: skip


SEEDS = ("1", "3", "4", "6", "7")
"""Of a schedule of kills: those of 1 to 7 with three or four kills in so short a time."""


def _goodput() -> Row:
    start = ("recovery/goodput.py", "--systems", "holdfast-respawn,torchft-tuned,torchrun", "--mtbf", "5", "--wall")
    two = ("--workers", "2", "--seed", "1")
    tiny = ("recovery/goodput.py", "--systems", "holdfast-respawn", "--mtbf", "2", "--wall", "3", *two)
    return Row(
        "goodput", "useful samples a second, 3 or 4 kills in 12 s, workers replaced", "/s",
        tuple((*start, "12", "--seed", seed) for seed in SEEDS), readers.goodput,
        {
            "torchft-tuned": Peer("torchft", "peers", "torchft", "heartbeat timeout 500 ms, join timeout 200 ms"),
            "torchrun": Peer("torchrun", "peers", settings="all workers restarted, checkpoint every 10 steps"),
        },
        (tiny,), limit="its own rate without kills", limit_s=600, more_is_better=True,
        long=tuple((*start, "60", "--seed", str(seed)) for seed in range(1, 11)),
    )  # fmt: skip


def _processes(name: str, ours: str, peers: dict[str, Peer]) -> Row:
    start = ("launch/start.py", "--names", "the interpreter", ours)
    return Row(
        name, f"{ours}, the process", "s", ((*start, *peers, "--rounds", "9"),), readers.processes(ours, *peers), peers,
        ((*start, "--rounds", "1"),), limit="the bare interpreter", limit_s=75,
        long=((*start, *peers, "--rounds", "30"),),
    )  # fmt: skip


def _simulate() -> Row:
    one = ("scale/simulate.py", "--repetitions", "1000", "--workers", "10000", "--days", "90")
    return Row(
        "simulate", "histories of 90 days and 10,000 workers, one core", "/s", (one,) * 6, readers.simulator, {},
        (("scale/simulate.py", "--repetitions", "10", "--workers", "100", "--days", "2"),), limit_s=90, more_is_better=True,
        long=(("scale/simulate.py",),) * 6,
    )  # fmt: skip


def _inject() -> Row:
    start = ("inject/injection.py", "--bytes", "1e9", "--live-flips", "--rounds")
    peers = {
        "by value": Peer("a loop in h5py", package="h5py", settings="as short as possible: no log, one seed"),
        "by tensor": Peer("numpy, whole data sets", package="h5py", settings="reads and writes each data set once"),
    }
    return Row(
        "inject", "1,000 flips in an HDF5 file of 1 GB", "ms", ((*start, "7"),), readers.injection("holdfast", *peers),
        peers, (("inject/injection.py", "--bytes", "1e6", "--values", "1e4", "--flips", "10", "--live-flips", "--rounds", "1"),),
        limit="bare reads and writes of the same number", limit_s=120,
    )  # fmt: skip


ROWS: tuple[Row, ...] = (
    _all_reduce("allreduce", 8_500_000),
    _all_reduce("allreduce-small", 100_000),
    _step("step-mlp", "mlp", "an 8.5 M MLP", 150),
    _step("step-cnn", "cnn", "a 0.1 M CNN", 120),
    _step("step-gpt", "transformer", "a 10.7 M GPT", 180),
    _wide("cnn", "a 0.1 M CNN"),
    _wide("mlp", "an 8.5 M MLP"),
    _wide("resnet", "a 25.6 M ResNet"),
    _slices(),
    _split("sharded", "fsdp2-gloo", Peer("FSDP2 on Gloo", settings="fully_shard on every layer and on the model")),
    _split("pipeline", "gpipe-gloo", Peer("GPipe on Gloo", settings="ScheduleGPipe, one stage a worker")),
    _hosts(),
    _memory(),
    _kill(),
    _join(),
    _store("save", "save of 1 GB, synced", ("dd", "dd conv=fsync"), 210),
    _store("load", "load of 1 GB from the page cache", ("copy", "one copy of the state"), 150),
    _start_job(),
    _goodput(),
    _processes("import", "import holdfast", {"import torchft": Peer("import torchft", "peers", "torchft"), "import torch": Peer("import torch")}),
    _processes("help", "holdfast --help", {"torchrun --help": Peer("torchrun --help"), "ray --help": Peer("ray --help", "ray", "ray")}),
    _simulate(),
    _inject(),
)  # fmt: skip
"""All rows, in the order of the table."""

HOUR_S = 3600.0
"""What a run without ``--long`` may take at most: the sum of the deadlines, which a test holds."""
