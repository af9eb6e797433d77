"""One process that runs all workers, on the GPU: every strategy, bits with kills, and whether other bits are noticed."""

from __future__ import annotations

import tempfile

from gpus.jobs import Job, state_of, whole
from gpus.results import Results, Where

FAULTS = (
    "kill:rank=1,step=2,phase=forward", "kill:rank=2,step=4,phase=backward",
    "kill:rank=3,step=6,phase=allreduce", "kill:rank=0,step=8,phase=optimizer",
)  # fmt: skip


def run(where: Where, results: Results) -> None:
    """Compare the runs."""
    for model in ("tiny-mlp",) if where.tiny else ("mlp", "cnn", "transformer"):
        undisturbed = state_of(Job(where, model, 6, fabric="virtual").run())
        for strategy in ("rollback", "restart"):
            with tempfile.TemporaryDirectory() as folder:
                options = ("--strategy", strategy, "--checkpoint-dir", folder)
                report = Job(where, model, 6, faults=FAULTS, fabric="virtual", options=options).run()
            equal = state_of(report) == undisturbed and whole(report)
            results.check(f"{model}, {strategy}, kills in four phases", equal, "equal bits" if equal else "other bits")
        if not where.tiny:
            several = state_of(Job(where, model, 2).run())
            text = "equal bits" if several == undisturbed else "other bits"
            results.check(f"{model}, one process against two", several == undisturbed, text)
    undetermined(where, results)


def undetermined(where: Where, results: Results) -> None:
    """Train twice without deterministic kernels: are the bits equal, and does the run say which promise holds?"""
    model = "tiny-transformer" if where.tiny else "transformer"
    first, again = (Job(where, model, 2, words=(), fabric="virtual").run() for _ in range(2))
    same = "the same" if state_of(first) == state_of(again) else "other"
    promise = first["kinds"].get("promise", "none, on the CPU") if first["kinds"] else "none"
    results.figure("transformer, not deterministic, twice", f"{same} bits; the run promises: {promise}")
