"""Files: checkpoints of every format and kind of model, and folders of reports, that a tree writes, and that it or another one reads."""

import json
import shutil
from dataclasses import dataclass

import jobs
from runs import load
from tree import HERE, in_pairs

STOPPED = ("--checkpoint-every", 3, "--stop-after", 6, "--slices", 4)
VOLATILE = (
    "path",
    "url",
    "written",
    "written_s",
    "versions",
    "folder",
    "files",
    "bytes",
    "token",
    "name",
    "job",
    "a",
    "b",
)
"""What says when and where something was written, or how long such words are."""


@dataclass(frozen=True)
class Written:
    """A job that saves and stops, to be gone on with.

    Args:
        name: Of it.
        options: Of ``holdfast run``.
        script: Words of script.py.
        resumed: Options with which another run goes on.
    """

    name: str
    options: tuple
    script: tuple
    resumed: tuple = ("-n", 2, "--fabric", "virtual", "--slices", 4)


def _virtual(name, script, *options, workers=3, **more):
    return Written(name, ("-n", workers, "--fabric", "virtual", *STOPPED, *options), script, **more)


CNN = (*jobs.WHOLE, *jobs.CNN, *jobs.ADAM)
PARTIAL = ("--strategy", "partial", "--mirror-every", 4)
JOBS = [
    *(_virtual(f"whole-{form}", CNN, "--checkpoint-format", form) for form in ("safetensors", "hdf5", "npz", "dcp")),
    _virtual("whole-loop", (*jobs.WHOLE, "--features", "clip,scheduler,average")),
    _virtual("whole-scaler", (*jobs.WHOLE, "--features", "scaler,ema,augment")),
    _virtual("pipeline-dcp", jobs.PIPELINE, "--checkpoint-format", "dcp", workers=4),
    _virtual("sharded-npz", jobs.SHARDED, "--checkpoint-format", "npz"),
    _virtual("pipeline-partial", jobs.PIPELINE, *PARTIAL, workers=4, resumed=("-n", 4, "--fabric", "virtual", "--slices", 4, *PARTIAL)),
    Written("gloo-pipeline", ("-n", 2, "--fabric", "gloo", *STOPPED), jobs.PIPELINE),
    Written("ulfm-sharded", ("-n", 2, "--fabric", "ulfm", *STOPPED), jobs.SHARDED),
]  # fmt: skip
ALIKE = (
    ("whole-safetensors", "whole-hdf5"),
    ("whole-npz", "whole-dcp"),
    ("pipeline-dcp", "gloo-pipeline"),
    ("sharded-npz", "ulfm-sharded"),
)
"""Runs that are the same to the bit."""
REPLAYED = ("whole-safetensors", "pipeline-dcp")
"""Runs whose steps are done again by ``holdfast verify``."""


def record(tree, work):
    """Write the corpus, and read it with the tree that wrote it."""
    folder = work / "files"
    folder.mkdir()
    ended = in_pairs(lambda job: _write(tree, folder / job.name, job), JOBS)
    tree.script("corpus.py", "write", folder)
    (folder / "ended.json").write_text(json.dumps(ended))
    return read(tree, work, work / "files-read")


def _write(tree, here, job):
    here.mkdir()
    saving = ("--checkpoint-dir", here / "checkpoints", "--report", here / "report")
    return tree.holdfast("run", *saving, *job.options, HERE / "script.py", *job.script).code


def read(tree, written, scratch):
    """Return what a tree finds in the corpus that lies in the folder ``written`` of some tree's work."""
    corpus = written / "files"
    scratch.mkdir()
    places = sorted([*corpus.glob("*/checkpoints"), *corpus.glob("*/checkpoints/copies/*")])
    folders = {str(place.relative_to(corpus)): place for place in places}
    return {
        "ended": json.loads((corpus / "ended.json").read_text()),
        "shown": _shown(tree, folders, sorted((corpus / "foreign").iterdir())),
        "loaded": tree.script("corpus.py", "load", corpus, *folders),
        "resumed": in_pairs(lambda job: _resume(tree, corpus / job.name, scratch / job.name, job), JOBS),
        "reports": _reports(tree, corpus, scratch),
    }


def _shown(tree, folders, foreign):
    """What the commands say of each folder of checkpoints, and of each file of another program."""
    commands = {}
    for name, folder in folders.items():
        for verb in ("ls", "show", "verify"):
            commands[f"{name} {verb}"] = ("ckpt", verb, folder, "--json")
        if name.startswith("api"):
            commands[f"{name} diff"] = ("ckpt", "diff", folders["api-safetensors/checkpoints"], folder, "--json")
    for file in foreign:
        commands[f"{file.name} show"] = ("ckpt", "show", file, "--json")
    answers = zip(commands, tree.each(commands.values()), strict=True)
    return {
        name: {"exit": done.code, "said": _stable(json.loads(done.out)) if done.out else done.err}
        for name, done in answers
    }


def _stable(value):
    if isinstance(value, dict):
        return {name: _stable(each) for name, each in value.items() if name not in VOLATILE or _is_tensor(value)}
    return [_stable(each) for each in value] if isinstance(value, list) else value


def _is_tensor(value):
    return "dtype" in value


def _resume(tree, source, here, job):
    """Go on from a copy of what was saved, to the end of training."""
    here.mkdir()
    shutil.copytree(source / "checkpoints", here / "checkpoints")
    saving = ("--checkpoint-dir", here / "checkpoints", "--resume", "--report", here / "report")
    done = tree.holdfast("run", *saving, *job.resumed, HERE / "script.py", *job.script)
    if not (here / "report" / "report.json").is_file():
        return {"exit": done.code, "said": done.err[-300:]}
    report, events = load(here / "report")
    steps = {event["step"]: event["link"] for event in events if event["event"] == "StepCommitted"}
    return {
        "exit": done.code,
        "replicas": report["replicas"],
        "samples": report["samples"],
        "links": steps,
        "metrics": report["metrics"],
    }


def _reports(tree, corpus, scratch):
    """Draw, check and compare the reports."""
    names = [job.name for job in JOBS if (corpus / job.name / "report").is_dir()]
    for name in names:
        shutil.copytree(corpus / name / "report", scratch / "reports" / name)
    there = {name: scratch / "reports" / name for name in names}
    commands = {f"{name} report": ("report", folder) for name, folder in there.items()}
    commands |= {f"{name} verify": ("verify", "--records-only", "--json", folder) for name, folder in there.items()}
    for a, b in ALIKE:
        commands[f"{a} {b} diff-runs"] = ("diff-runs", there[a], there[b])
        commands[f"{a} {b} diff-runs, resumed"] = ("diff-runs", scratch / a / "report", scratch / b / "report")
    done = dict(zip(commands, tree.each(commands.values()), strict=True))
    found = {name: {"exit": one.code, "said": _words(one, scratch, corpus)} for name, one in done.items()}
    for name in REPLAYED:
        again = tree.holdfast("verify", there[name], "--script", HERE / "script.py", "--json")
        found[f"{name} replayed"] = {"exit": again.code, "said": _words(again, scratch, corpus)}
    return found | {
        "pages": sorted(name for name, folder in there.items() if (folder / "index.html").stat().st_size > 1000)
    }


def _words(done, *folders):
    text = done.out or done.err
    for folder in folders:
        text = text.replace(str(folder), "DIR")
    return text.splitlines()
