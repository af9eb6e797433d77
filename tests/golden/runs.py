"""Runs: what each ends with, every committed step with its link, and what was recovered from; and that old runs can be judged."""

import json
import re
import shutil
from pathlib import Path

import jobs
from tree import HERE, in_pairs

DIGEST = re.compile(r"\b[0-9a-f]{12,64}\b")
LETTERS = 12
"""Of the digests of a step; the last link and the state of the end are recorded whole."""


def record(tree, work):
    """Run all jobs; return what came of each by name."""
    folder = work / "runs"
    done = in_pairs(lambda job: run(tree, job, folder), [job for job in jobs.ALL if not job.after])
    done |= in_pairs(lambda job: run(tree, job, folder), [job for job in jobs.ALL if job.after])
    return done


def run(tree, job, folder):
    """Run a job; return what is recorded of it."""
    here = folder / job.name
    (here / "tmp").mkdir(parents=True)
    if job.after:
        shutil.copytree(folder / job.after / "checkpoints", here / "checkpoints")
    options = [here / "checkpoints" if word == "CHECKPOINTS" else word for word in job.options]
    script = job.script if job.is_example else (HERE / "script.py", *job.script)
    done = tree.holdfast("run", "--report", here / "report", *options, *script, tmp=here / "tmp")
    (here / "stdout").write_text(done.out)
    (here / "stderr").write_text(done.err)
    (here / "exit").write_text(f"{done.code}\n")
    return read(job, here)


def read(job, here):
    """Return what is recorded of a run that lies in ``here``."""
    code, out = int((here / "exit").read_text()), (here / "stdout").read_text()
    if not (here / "report" / "report.json").is_file():
        return {"exit": code, "report": None}
    report, events = load(here / "report")
    found = {"exit": code, "end": end_of(report, job), "steps": steps_of(events, job), "faults": faults_of(events)}
    if job.exact_events:
        found["recovered"] = recovered_of(events)
        found["report"] = {
            name: report[name] for name in ("guard", "checkpoints", "restored", "optimizer_overlap") if name in report
        }
        found["report"] = drop_times(found["report"])
    if job.is_example:
        found["printed"] = sorted(set(DIGEST.findall(out)))
    return found


def load(folder):
    """Return report.json and the lines of events.jsonl."""
    lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    return json.loads((Path(folder) / "report.json").read_text()), [json.loads(line) for line in lines]


def end_of(report, job):
    """What all runs of a job end with."""
    names = ("outcome", "steps", "restarts", "samples", "replicas", "certificate", "metrics", "lost")
    finished = [] if job.timed else report["workers"]["ranks_finished"]
    return {name: report.get(name) for name in names} | {"finished": finished}


def steps_of(events, job):
    """Return a line for each committed step: one that was taken back, or that a new lead writes again, by its last record."""
    lines = {}
    for event in events:
        if event["event"] == "StepCommitted":
            workers = "" if job.timed else event["workers"]
            digests = [event.get(name, "")[:LETTERS] for name in ("link", "ids", "figures", "state")]
            lines[event["step"]] = (
                f"epoch {event['epoch']} samples {event['samples']} workers {workers} {' '.join(digests)}"
            )
    return [f"{step}: {lines[step]}" for step in sorted(lines)]


def faults_of(events):
    """What struck, and what it altered."""
    struck = [(e["fault"], e["kind"], e["rank"], e["step"], e["phase"]) for e in events if e["event"] == "FaultFired"]
    altered = [(e["fault"], e["target"], e["count"], e["values"]) for e in events if e["event"] == "ValuesAltered"]
    return {"struck": sorted(struck), "altered": sorted(altered, key=str)}


def recovered_of(events):
    """What each survivor decided, with how many orders of each name."""
    names = ("rank", "step", "lost", "survivors", "decision", "redone_steps", "generation", "joined", "orders")
    return [{name: event[name] for name in names} for event in events if event["event"] == "Recovered"]


def drop_times(value):
    """Leave out what is measured in seconds."""
    if isinstance(value, dict):
        return {k: drop_times(v) for k, v in value.items() if not k.endswith("_s")}
    return [drop_times(each) for each in value] if isinstance(value, list) else value


def judge(tree, base, new):
    """Let ``holdfast diff-runs`` of a tree compare the runs of two; return the lines about those that are not the same."""
    pairs = [job.name for job in jobs.ALL if job.certified]
    folders = [[side / "runs" / name / "report" for side in (base, new)] for name in pairs]
    there = [(name, pair) for name, pair in zip(pairs, folders, strict=True) if all(f.is_dir() for f in pair)]
    answers = tree.each([("diff-runs", *pair) for _, pair in there])
    for (name, _), done in zip(there, answers, strict=True):
        # 3: a run that the guard warned of was not of one state. An older tree says "part".
        if done.code not in (0, 3) or "they diverge" in done.out or "they part" in done.out:
            yield f"diff-runs {name}: exit {done.code}: {' '.join((done.out or done.err).split())[-300:]}"
