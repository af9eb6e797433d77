"""The jobs that are recorded: a covering selection of models, optimizers, strategies, fabrics and faults, and all examples."""

from dataclasses import dataclass

WHOLE, PIPELINE, SHARDED = ("whole",), ("pipeline", "--optimizer", "adam"), ("sharded", "--model", "cnn")
CNN, ADAM, ROWS = ("--model", "cnn"), ("--optimizer", "adam"), ("--model", "rows")
SAVING = ("--checkpoint-dir", "CHECKPOINTS", "--checkpoint-every", 3)
"""CHECKPOINTS is replaced by a folder of the job's own."""
BACKUPS = ("--strategy", "partial", "--mirror-every", 4)
HALF = ("--mirror-fraction", 0.5)
AFTER_ONE = "phase=allreduce,bucket=0"
"""In the sum that follows that of the first bucket."""


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        name: Of the job.
        options: Of ``holdfast run``, without the report.
        script: What stands behind the options: words of script.py, or an example of the tree and its words.
        timed: Who joins when depends on time, and with it the number of workers in a step.
        after: The job whose checkpoints it goes on from.
        certified: The run has links, by which ``holdfast diff-runs`` compares.
    """

    name: str
    options: tuple
    script: tuple
    timed: bool = False
    after: str = ""
    certified: bool = True

    @property
    def is_example(self):
        """Whether the tree's own script runs."""
        return str(self.script[0]).endswith(".py")

    @property
    def fabric(self):
        """How the workers talk."""
        return self.options[self.options.index("--fabric") + 1] if "--fabric" in self.options else "ulfm"

    @property
    def exact_events(self):
        """Who sees a failure when is the same each time: one process plays all workers."""
        return self.fabric == "virtual"


def kills(*specs):
    """Options that kill workers, each given as ``rank,step[,more]``."""
    words = []
    for spec in specs:
        rank, step, *more = spec.split(",")
        words += ["--inject", ",".join([f"kill:rank={rank}", f"step={step}", *more])]
    return tuple(words)


def flips(*specs):
    """Options that flip bits."""
    return tuple(word for spec in specs for word in ("--inject", f"flip:{spec}"))


def virtual(name, workers, *options, script=WHOLE, **more):
    """A job of workers that one process plays."""
    return Job(f"virtual-{name}", ("-n", workers, "--fabric", "virtual", *options), script, **more)


def real(fabric, name, workers, *options, script=WHOLE, **more):
    """A job of as many processes."""
    return Job(f"{fabric}-{name}", ("-n", workers, "--fabric", fabric, *options), script, **more)


REPLICATED = [
    virtual("undisturbed", 4, script=(*WHOLE, *CNN, *ADAM)),
    virtual("rollback", 4, *kills(f"1,3,{AFTER_ONE}"), script=(*WHOLE, *CNN)),
    virtual("rollback-many", 6, *kills("0,2,phase=forward", "4,2,phase=forward", "1,8,phase=optimizer", "2,8,phase=recovery")),
    virtual("rollback-local", 4, "--batch", "local", *kills("3,5"), script=(*WHOLE, *ADAM)),
    virtual("rollback-spare", 3, "--spares", 1, *kills("1,4,phase=allreduce"), script=(*WHOLE, *CNN, *ADAM)),
    virtual("rollback-loop", 4, *kills("1,4"), script=(*WHOLE, *CNN, "--features", "clip,average,scheduler")),
    virtual("rollback-scaler", 3, *kills("1,4"), script=(*WHOLE, *ADAM, "--features", "scaler,clip")),
    virtual("rollback-noise", 3, *kills("1,4"), script=(*WHOLE, "--features", "augment,loaders,ema")),
    virtual("rollback-compute", 3, "--slices", 6, *kills("1,4"), script=(*WHOLE, *ROWS, "--features", "compute")),
    virtual("rollback-stops", 3, "--min-workers", 3, *SAVING, *kills("1,7")),
    virtual("rollback-bare", 3, "--no-certificate", *kills("1,7"), certified=False),
    virtual("forward", 4, "--strategy", "forward", *kills(f"1,4,{AFTER_ONE}"), script=(*WHOLE, *ADAM)),
    virtual("forward-original", 4, "--strategy", "forward", "--rescale", "original", *kills("1,4", "2,6"), script=(*WHOLE, *CNN)),
    virtual("restart", 4, "--strategy", "restart", *SAVING, *kills("1,4", "2,11,phase=optimizer"), script=(*WHOLE, *ADAM)),
    virtual("reinit-own", 4, "--strategy", "reinit", *kills("1,3", "0,7"), script=(*WHOLE, *CNN, *ADAM)),
    virtual("reinit-checkpoint", 4, "--strategy", "reinit", "--reinit-from", "checkpoint", *SAVING, *kills("1,5"), script=(*WHOLE, *CNN)),
    virtual("eager", 4, "--overlap-optimizer", *kills(f"1,4,{AFTER_ONE}", "0,9,phase=optimizer"), script=(*WHOLE, *CNN, *ADAM)),
    virtual("guard-heal", 3, "--guard", "heal", *flips("rank=1,step=5,target=weights,count=5,bits=mantissa")),
    virtual("guard-warn", 3, "--guard", "warn", *flips("rank=1,step=5,target=gradients,scale=-2")),
    virtual("guard-stop", 3, "--max-restarts", 0, *flips("rank=1,step=5,target=weights,count=5,bits=mantissa")),
    virtual("guard-sums", 3, "--guard", "heal", "--guard-sums", *flips("rank=1,step=6,target=message,bucket=1,count=1,bits=22")),
    virtual("saved", 4, *SAVING, "--stop-after", 6, script=(*WHOLE, *CNN, *ADAM)),
    virtual("resumed", 3, *SAVING, "--slices", 4, "--resume", *kills("1,9"), script=(*WHOLE, *CNN, *ADAM), after="virtual-saved"),
]  # fmt: skip

SPLIT = [
    virtual("pipeline-rollback", 5, *kills("1,3,phase=handover", "0,8"), script=PIPELINE),
    virtual("pipeline-partial", 4, *BACKUPS, *kills("1,7"), script=PIPELINE),
    virtual("pipeline-partial-int8", 4, *BACKUPS, *HALF, "--mirror-codec", "int8", "--mirror-predictor", "calibrated", "--mirror-distance", "scaled", *kills("2,9"), script=PIPELINE),
    virtual("sharded-loop", 4, *kills("1,4"), script=(*SHARDED, *ADAM, "--features", "clip,scheduler,average")),
    virtual("sharded-partial", 4, *BACKUPS, *HALF, "--mirror-choice", "round-robin", "--mirror-predictor", "line", *kills("2,7"), script=SHARDED),
    virtual("sharded-reinit", 3, "--strategy", "reinit", "--reinit-from", "checkpoint", *SAVING, *kills("1,7"), script=SHARDED),
]  # fmt: skip

REAL = [
    real("ulfm", "rollback", 3, *kills(f"1,3,{AFTER_ONE}", "0,8,phase=optimizer"), script=(*WHOLE, *CNN, *ADAM)),
    real("ulfm", "spare", 2, "--spares", 1, *kills("1,4,phase=allreduce")),
    real("ulfm", "again", 2, *SAVING, *kills("0,8", "1,8"), script=(*WHOLE, *ADAM)),
    real("ulfm", "reinit", 3, "--strategy", "reinit", *kills("1,5"), script=(*WHOLE, *CNN)),
    real("ulfm", "eager", 3, "--overlap-optimizer", *kills(f"1,4,{AFTER_ONE}"), script=(*WHOLE, *CNN, *ADAM)),
    real("ulfm", "pipeline", 3, *kills("1,5,phase=handover"), script=PIPELINE),
    real("ulfm", "heal", 3, "--guard", "heal", *flips("rank=1,step=5,target=weights,count=5,bits=mantissa")),
    real("gloo", "rollback", 3, *kills(f"1,3,{AFTER_ONE}", "2,3,phase=recovery"), script=(*WHOLE, *CNN)),
    real("gloo", "restart", 2, "--strategy", "restart", *SAVING, *kills("1,8"), script=(*WHOLE, *ADAM)),
    real("gloo", "respawn", 2, "--slices", 4, "--respawn", *kills("1,3"), script=(*WHOLE, *CNN, "--awaits", 2), timed=True),
    real("gloo", "sharded", 3, *kills("1,4"), script=(*SHARDED, *ADAM)),
    real("gloo", "hang", 2, "--hang-timeout", 4, "--inject", "hang:rank=1,step=5,phase=backward"),
]  # fmt: skip


def example(number, name, *options, words=(), case="", **more):
    """A job of an example."""
    return Job(f"example-{number}{case}", tuple(options), (f"examples/{number}_{name}.py", *words), **more)


EXAMPLES = [
    example("01", "survive_a_kill", "-n", 4, *kills("1,40", "2,90")),
    example("02", "forward", "-n", 4, "--fabric", "virtual", *kills("1,40")),
    example("03", "start_again", "-n", 2, "--checkpoint-dir", "CHECKPOINTS", *kills("0,60", "1,60")),
    example("04", "stop_early", "-n", 4, "--fabric", "virtual", *kills("3,30")),
    example("05", "your_own_data", "-n", 4, "--fabric", "virtual", *kills("0,50,phase=allreduce")),
    example("06", "unmodified_ddp", "-n", 4, *kills("0,40,phase=allreduce", "2,90"), certified=False),
    example("06", "unmodified_ddp", "-n", 3, case="-undisturbed", certified=False),
    example("07", "come_back", "-n", 3, "--spares", 1, *kills("1,20")),
    example("08", "reinit", "-n", 4, "--fabric", "virtual", "--strategy", "reinit", *kills("1,40")),
]

ALL = [*REPLICATED, *SPLIT, *REAL, *EXAMPLES]
