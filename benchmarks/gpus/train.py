"""A training for the sections that run jobs: ``train.py MODEL --device cuda [--steps 12] [--features amp,fused] ...``.

It logs ``step_ms``, the mean of a step after the warm-up, and ``peak_bytes`` of device memory. With ``--plain`` it is the
usual loop without Holdfast, and prints them; with ``--ddp`` that of DistributedDataParallel, started by torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Transformer, characters, cnn, images, mlp
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

FEATURES = (
    "compile",
    "reduce-overhead",
    "autocast",
    "scaler",
    "fused",
    "channels-last",
    "checkpointing",
    "tied",
    "clip",
)
SYNCHRONISING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense")
SPIN_S = 30.0
"""How long the kernel of ``--sick spin`` computes: it must end by itself, because nothing else can end it."""


def of_width(width: int, layers: int) -> Callable[[], nn.Module]:
    """Return a function that makes a transformer with about 12 * width ** 2 * layers parameters."""
    return type("Sized", (Transformer,), {"WIDTH": width, "HEADS": max(1, width // 64), "LAYERS": layers})


def wide(width: int) -> Callable[[], nn.Module]:
    """Return a function that makes four square layers: many parameters, and activations that take no memory."""
    return lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), *(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 10)
    )


PICTURES, TEXT = images(1, 28, 10), characters
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "mlp": (mlp, PICTURES),
    "cnn": (cnn, PICTURES),
    "transformer": (Transformer, TEXT),
    "tiny-mlp": (wide(16), PICTURES),
    "tiny-transformer": (of_width(16, 1), TEXT),
    "25M": (of_width(512, 8), TEXT),
    "350M": (of_width(1024, 28), TEXT),
    "1B": (of_width(1536, 36), TEXT),
    "wide": (wide(4096), PICTURES),
}


def main() -> None:
    """Train."""
    options = parse()
    device = torch.device(options.device)
    if options.ddp and options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(options.deterministic)
    torch.manual_seed(0)
    with device:
        model = adapted(MODELS[options.model][0](), options.features)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused="fused" in options.features or None)
    dataset = MODELS[options.model][1](options.batch * options.steps, None)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10) if "scaler" in options.features else None
    run = train_plainly if options.plain else train_with_ddp if options.ddp else train_with_session
    run(options, device, model, optimizer, dataset, scaler)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not timed")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step, over all workers")
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--features", type=lambda text: text.split(",") if text else [], default=[])
    parser.add_argument("--compute", action="store_true", help="step.compute instead of a loop over the slices")
    parser.add_argument("--profile", action="store_true", help="log how often a step makes the host wait")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--sick", metavar="WHAT:RANK:STEP", default="", help="assert, oom, or spin")
    options = parser.parse_args()
    if odd := set(options.features) - set(FEATURES):
        parser.error(f"--features must be of {', '.join(FEATURES)}, got {', '.join(sorted(odd))}")
    return options


def adapted(model: nn.Module, features: list[str]) -> nn.Module:
    """Return the model with what the features change in it."""
    if "channels-last" in features:
        model = model.to(memory_format=torch.channels_last)
    if "tied" in features:
        model.head.weight = model.characters.weight
    if "checkpointing" in features:
        model.layers = Checkpointed(model.layers)
    if "compile" in features:
        return torch.compile(model)
    return torch.compile(model, mode="reduce-overhead") if "reduce-overhead" in features else model


class Checkpointed(nn.Module):
    """Computes each layer again in the backward pass."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def loss_of(
    options: argparse.Namespace, device: torch.device, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of a batch."""
    lower = "autocast" in options.features or "scaler" in options.features
    dtype = torch.float16 if "scaler" in options.features and device.type == "cuda" else torch.bfloat16
    if "channels-last" in options.features:
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast(device.type, dtype=dtype, enabled=lower):
        return F.cross_entropy(model(x.to(device)).flatten(0, -2), y.to(device).flatten())


def sent_bytes() -> int:
    """Return how many bytes this machine has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(numbers.split()[8]) for name, numbers in (line.split(":") for line in lines) if name.strip() != "lo")


class Clock:
    """Times the steps after a warm-up, until the device has computed them."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._device, self._left, self._steps = device, warm_up, 0
        self._since_s, self._sent = time.perf_counter(), 0

    def begin(self) -> None:
        """A step begins."""
        if self._left == 0 and self._steps == 0:
            self._synchronize()
            self._since_s, self._sent = time.perf_counter(), sent_bytes()
        self._steps += self._left <= 0
        self._left -= 1

    def figures(self) -> dict[str, float]:
        """Return what was measured; call it behind the last step."""
        self._synchronize()
        took_s = time.perf_counter() - self._since_s
        on_gpu = self._device.type == "cuda"
        peak = float(torch.cuda.max_memory_allocated()) if on_gpu else 0.0
        steps = max(1, self._steps)
        return {"step_ms": 1e3 * took_s / steps, "peak_bytes": peak, "sent_bytes": (sent_bytes() - self._sent) / steps}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def train_plainly(
    options: argparse.Namespace, device: torch.device, model: nn.Module, optimizer: Any, dataset: Any, scaler: Any
) -> None:
    """The usual loop."""
    clock = Clock(device, options.warm_up)
    for step in range(options.steps):
        clock.begin()
        x, y = dataset[step * options.batch : (step + 1) * options.batch]
        optimizer.zero_grad()
        loss_of(options, device, model, x, y).backward()
        optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps(clock.figures() | {"parameters": parameters}))


def train_with_ddp(
    options: argparse.Namespace, device: torch.device, model: nn.Module, optimizer: Any, dataset: Any, scaler: Any
) -> None:
    """The usual loop of torchrun."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    together = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    clock, share = Clock(device, options.warm_up), options.batch // ranks
    for step in range(options.steps):
        clock.begin()
        first = step * options.batch + rank * share
        x, y = dataset[first : first + share]
        optimizer.zero_grad()
        loss_of(options, device, together, x, y).backward()
        optimizer.step()
    print(json.dumps(clock.figures()))
    dist.destroy_process_group()


def train_with_session(
    options: argparse.Namespace, device: torch.device, model: nn.Module, optimizer: Any, dataset: Any, scaler: Any
) -> None:
    """The same over Holdfast."""
    import holdfast

    clip = 1.0 if "clip" in options.features else None
    session = holdfast.Session(model, optimizer, slices=options.slices, scaler=scaler, clip_grad_norm=clip)
    clock, counts = Clock(device, options.warm_up), Counts(options)
    for step in session.steps(dataset, options.batch, 1):
        clock.begin()
        with counts.of_step(step.number):
            make_sick(options.sick, step.number, device)
            if options.compute:
                step.compute(model, F.cross_entropy)
                continue
            for x, y in step:
                step.backward(loss_of(options, device, model, x, y))
    session.log(**clock.figures(), **counts.figures())


class Counts:
    """Counts in the profiler what makes the host wait for the device, in three steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._first = options.warm_up if options.profile else -1
        self._found: list[int] = []

    @contextlib.contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """Count in a step: the part of it that is the script's, and its backward passes."""
        if not 0 <= self._first <= number < self._first + 3:
            yield
            return
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            yield
        self._found.append(sum(event.count for event in seen.key_averages() if event.key in SYNCHRONISING))

    def figures(self) -> dict[str, float]:
        """Return the median."""
        return {"host_waits": float(sorted(self._found)[len(self._found) // 2])} if self._found else {}


def make_sick(what: str, step: int, device: torch.device) -> None:
    """Break the device, if this is the worker and the step: ``WHAT:RANK:STEP``."""
    kind, _, place = what.partition(":")
    if not kind or place != f"{os.environ.get('HOLDFAST_RANK', '0')}:{step}":
        return
    if kind == "assert":
        torch.zeros(2, device=device)[torch.full((1,), 5, device=device)].sum().item()
    elif kind == "oom":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    else:
        torch.cuda._sleep(int(SPIN_S * 1.5e9))  # in cycles
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
