"""A device that fails in one of several workers: a device-side assert, too little memory, a kernel that does not end.

On a CPU the exceptions are raised by ``--inject``; on a GPU they are the driver's.
"""

from __future__ import annotations

from gpus.jobs import Job, killed, state_of, whole
from gpus.results import Results, Where

KILL = "kill:rank=0,step=2,phase=forward"
CASES = {
    "device-side assert": ("assert:1:4", (), (), [1]),
    "out of memory after taking over slices": ("oom:1:4", (KILL,), (), [0, 1]),
    "a kernel that computes for 30 s": ("spin:1:4", (), ("--hang-timeout", 5), [1]),
}
"""What happens to rank 1 in step 4; further faults; options; and which workers end by SIGKILL."""
INJECTED = {"assert": ["gpu-error"], "oom": ["gpu-oom"] * 2, "spin": ["gpu-hang"]}
"""The same without a GPU. Out of memory twice: the first time the slice is computed again."""


def run(where: Where, results: Results) -> None:
    """Compare with the undisturbed run."""
    model = "tiny-mlp" if where.tiny else "cnn"
    undisturbed = state_of(Job(where, model, 3).run())
    for name, (what, faults, options, expected) in CASES.items():
        kind = what.split(":")[0]
        words: tuple[str, ...] = ("--deterministic", "--sick", what)
        if not where.is_gpu:
            words = ("--deterministic", "--compute")
            faults = (*faults, *(f"{fault}:rank=1,step=4,phase=backward" for fault in INJECTED[kind]))
        report = Job(where, model, 3, words=words, faults=faults, options=options).run()
        equal = state_of(report) == undisturbed and whole(report)
        ended = killed(report)
        lost = [event["what"] for event in report["events"] if event["event"] == "DeviceLost"]
        text = (
            f"workers {ended} ended{f', recorded as {lost[0]}' if lost else ''}; {'equal' if equal else 'other'} bits"
        )
        results.check(name, equal and ended == expected, text)
