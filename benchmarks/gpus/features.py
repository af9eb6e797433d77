"""Features of PyTorch on the device: are the bits after a kill those of the undisturbed run?"""

from __future__ import annotations

from gpus.jobs import Job, killed, state_of, whole
from gpus.results import Results, SectionFailed, Where

FEATURES = {
    "torch.compile": ("transformer", "compile"),
    "torch.compile, reduce-overhead": ("transformer", "reduce-overhead"),
    "autocast": ("transformer", "autocast"),
    "GradScaler": ("transformer", "autocast,scaler"),
    "fused Adam": ("mlp", "fused"),
    "channels_last": ("cnn", "channels-last"),
    "activation checkpointing": ("transformer", "checkpointing"),
    "tied weights": ("transformer", "tied"),
    "clipping": ("mlp", "clip"),
}
TINY = {"transformer": "tiny-transformer", "mlp": "tiny-mlp", "cnn": "cnn"}
TRIED = ("GradScaler", "tied weights")
"""What is tried at tiny size."""
KILL = "kill:rank=1,step=4,phase=allreduce"


def run(where: Where, results: Results) -> None:
    """Try each; what does not work is said, and the others are tried."""
    for name in TRIED if where.tiny else FEATURES:
        model, features = FEATURES[name]
        words = ("--deterministic", "--features", features)
        model = TINY[model] if where.tiny else model
        try:
            undisturbed = state_of(Job(where, model, 2, words=words).run())
            report = Job(where, model, 2, words=words, faults=(KILL,)).run()
        except SectionFailed as failed:
            results.figure(name, f"does not work: {str(failed).strip().splitlines()[-1][:200]}")
            continue
        equal = bool(undisturbed) and state_of(report) == undisturbed and whole(report) and killed(report) == [1]
        results.figure(name, "equal bits after a kill" if equal else "other bits after a kill")
