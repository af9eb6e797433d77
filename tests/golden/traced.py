"""Runs in a process of the tree under test: what a protocol is told and answers, seed by seed; what decides bits here.

traced.py platform
traced.py seeds FIRST AFTER
traced.py whole SEED
"""

import hashlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import doors
import script
import torch

PHASES = ("forward", "backward", "allreduce", "optimizer", "recovery")
OF_SPLIT = ("handover", "rehome")
STRATEGIES = {
    "whole": ("rollback", "rollback", "forward", "restart", "reinit"),
    "pipeline": ("rollback", "rollback", "restart", "reinit", "partial"),
    "sharded": ("rollback", "rollback", "restart", "reinit", "partial"),
}
STEPS = 14


def draw(seed):
    """Return the arguments of the training and its faults."""
    rng = random.Random(f"golden {seed}")
    kind = rng.choice(("whole", "whole", "whole", "pipeline", "sharded"))
    workers, spares = rng.choice((2, 3, 3, 4, 5, 6)), rng.choice((0, 0, 1, 2))
    strategy = rng.choice(STRATEGIES[kind])
    given = {
        "kind": kind, "model": rng.choice(("mlp", "cnn")), "optimizer": rng.choice(("sgd", "adam")),
        "workers": workers, "spares": spares, "strategy": strategy, "slices": rng.choice((0, 4, 7)),
        "order": rng.choice(("fold", "fold", "tree")), "checkpoint_every": rng.choice((2, 3, 5)),
        "min_workers": rng.choice((1, 1, 1, 2)), "split": rng.choice(("slices", "slices", "slices", "even")),
        "batch": rng.choice(("global", "global", "global", "local")), "rescale": rng.choice(("survivors", "original")),
    }  # fmt: skip
    if kind == "whole":
        given["reinit_from"] = rng.choice(("own", "root", "checkpoint"))
    else:
        given |= {"mirror": rng.choice((0, 1, 1, 2)), "reinit_from": "checkpoint"}
    if strategy == "partial" and rng.random() < 0.6:
        given |= {"mirror_every": 4, "mirror_fraction": rng.choice((0.5, 1.0)), "mirror": 1}
    if kind == "whole" and strategy != "forward" and rng.random() < 0.3:
        given["overlap_optimizer"] = True
    phases = PHASES if kind == "whole" else PHASES + OF_SPLIT
    faults = [_kill(rng, rank, phases) for rank in rng.sample(range(workers + spares), rng.randint(1, workers - 1))]
    if kind == "whole" and strategy != "forward" and rng.random() < 0.3:
        given["guard"] = "heal"
        target = rng.choice(("weights", "optimizer", "gradients"))
        rank, step = rng.randrange(workers), rng.randrange(1, STEPS)
        faults.append(f"flip:rank={rank},step={step},target={target},count=3,bits=mantissa")
    return given, faults


def _kill(rng, rank, phases):
    phase = rng.choice(phases)
    bucket = f",bucket={rng.randrange(2)}" if phase == "allreduce" and rng.random() < 0.5 else ""
    return f"kill:rank={rank},step={rng.choice((3, 6, rng.randrange(STEPS)))},phase={phase}{bucket}"


def run(seed):
    """Train as a seed says; return the lines of the trace, and the bits that came out."""
    given, faults = draw(seed)
    lines = [f"{given} {faults}"]
    doors.tap_protocol(lambda event, orders: lines.append(f"{doors.plain(event)} -> {doors.plain(orders)}"))
    with tempfile.TemporaryDirectory() as folder:
        place = {"run_dir": folder, "checkpoint_dir": str(Path(folder) / "c"), "fabric": "virtual"}
        try:
            _train(given, {"faults": doors.fault_plan(faults)} | place)
            lines.append("done")
        except (Exception, SystemExit) as error:  # how it ended is what is recorded
            lines.append(
                f"ended with {type(error).__name__}: {str(error).replace(folder, 'DIR').splitlines()[0] if str(error) else ''}"
            )
        records = [json.loads(line) for file in sorted(Path(folder).glob("records-*.jsonl")) for line in file.open()]
    return [*lines, *map(_said, (r for r in records if r["event"] in _SAID))], _bits(records)


def _train(given, place):
    """As script.py does; an application that is built again is built by main."""
    script.holdfast.reinit(lambda: script.train(**given, **place))


_SAID = (
    "Recovered",
    "FailureSeen",
    "FaultFired",
    "CorruptionFound",
    "CorruptionHealed",
    "PartRestored",
    "Finished",
    "Reinitialised",
)
_BITS = ("sha256", "state_sha256", "metrics", "where", "link", "checkpoint")


def _said(record):
    fields = {name: value for name, value in record.items() if not name.endswith("_s") and name not in _BITS}
    return json.dumps(fields, sort_keys=True)


def _bits(records):
    """The link of each committed step, and the hash of the end, as one digest."""
    ends = [record["state_sha256"] for record in records if record["event"] == "Finished"]
    steps = {record["step"]: record["link"] for record in records if record["event"] == "StepCommitted"}
    return {"links": _digest(json.dumps(sorted(steps.items()))), "state": ends[-1] if ends else "", "steps": len(steps)}


def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def apart(work):
    """Do something in a process of its own, which has imported everything already; return what it returns."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        os.dup2(2, 1)
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def warm():
    """Import what torch and Holdfast import when they are first used: the processes of all seeds have it then."""
    model = script.reference.make_model("cnn")
    for make in script.OPTIMIZERS.values():
        optimizer = make(model.parameters())
        x, y = script.reference.data()
        script.F.cross_entropy(model(x[:2]), y[:2]).backward()
        optimizer.step()
    for name in script.holdfast.__all__:
        getattr(script.holdfast, name)


def summary(seed):
    """What is recorded of a seed."""
    lines, bits = run(seed)
    return {"lines": len(lines), "sha256": _digest("\n".join(lines)), "bits": bits}


def platform():
    """Return what decides bits, as the record of a run says it."""
    with tempfile.TemporaryDirectory() as folder:
        script.train("whole", epochs=1, workers=1, fabric="virtual", run_dir=folder)
        records = [json.loads(line) for file in Path(folder).glob("records-*.jsonl") for line in file.open()]
    return next(record["kind"] for record in records if record["event"] == "RunStarted")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm()
    match sys.argv[1:]:
        case ["platform"]:
            print(json.dumps(apart(platform)))
        case ["seeds", first, after]:
            print(json.dumps({seed: apart(lambda seed=seed: summary(seed)) for seed in range(int(first), int(after))}))
        case ["whole", seed]:
            print(json.dumps(apart(lambda: run(int(seed))[0])))
