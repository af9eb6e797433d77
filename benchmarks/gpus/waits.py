"""How often a step makes the host wait for the device, and how fast a state is hashed there."""

from __future__ import annotations

import torch

from gpus.jobs import Job
from gpus.kernel import seconds
from gpus.results import Results, Where
from holdfast.integrity.device_digest import mixed_sum


def run(where: Where, results: Results) -> None:
    """Count, and measure."""
    for model in ("cnn", "25M"):
        for name, fabric in (("one process", "virtual"), ("one worker over gloo", "gloo")):
            words = ("--profile", "--steps", 12, "--slices", 1)
            waits = Job(where, model, 1, words=words, fabric=fabric).run()["metrics"]["host_waits"]
            results.figure(f"{model}, {name}", f"{waits:.0f} waits of the host in the script's part of a step")
    numbers = torch.randn(1 << 28, device=where.device)
    rate = numbers.numel() * 4 / 1e9 / seconds(where, lambda: mixed_sum(numbers))
    results.figure("hash of a tensor of 1 GiB", f"{rate:.0f} GB/s")
