"""Processes that write checkpoints and are killed meanwhile, each forked from one that has already imported torch."""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import torch
from checkpoint_chain import Chain, MortalStorage, small_blocks

from holdfast.checkpoint import CheckpointStore, newest_intact, take, write, write_tensors
from holdfast.checkpoint.manifest import MANIFEST_NAME, dump
from holdfast.checkpoint.save import remove
from holdfast.checkpoint.writer import CheckpointWriter
from holdfast.errors import CheckpointError
from holdfast.faults import points

DEADLINE_S = 60
SIZE = 1000
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "holdfast.checkpoint", "holdfast.checkpoint.writer"])


def start(target, *args):
    process = _context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def end(*processes):
    """Wait for processes; return their exit statuses."""
    for process in processes:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    assert None not in codes, "a writer hangs"
    return codes


def state_of(value):
    return {"w": torch.full((SIZE,), float(value)), "b": torch.full((7, 3), float(value)), "value": value}


def die_at(point, nth=1):
    """Kill this process when it passes a point for the n-th time."""
    left = [nth]

    def reach(name):
        left[0] -= name == point
        if name == point and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    points.arm(reach)


def write_part(root, step, value, part, parts, token, point="", nth=1, commits=True):
    """Write a part of a checkpoint, and complete it if this process must; print the reason if that fails."""
    die_at(point, nth)
    pending = write(root, step, take(state_of(value), part, parts), {"value": value}, token=token)
    if commits:
        try:
            pending.commit(0, wait_s=5)
        except CheckpointError as error:
            raise SystemExit(str(error)) from None


def write_beside(root, step, value, point, nth=1):
    """Write a checkpoint in the thread of a Writer."""
    die_at(point, nth)
    writer = CheckpointWriter(CheckpointStore(root), background=True)
    writer.begin(step, take(state_of(value)), {"value": value})
    writer.commit(0)
    writer.wait()


def save_chain(root, dies_after):
    """Save incremental checkpoints; die in the fifth, before its n-th operation that changes the disk."""
    small_blocks(SimpleNamespace(setattr=setattr))
    chain = Chain(Path(root), storage=MurderedStorage)
    for step in range(1, 6):
        chain.save([step], dies_after=dies_after if step == 5 else -1)


class MurderedStorage(MortalStorage):
    def _pass(self):
        if self.dies_after == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dies_after -= self.dies_after > 0


def write_manifest_first(root, step, value, point):
    """A forbidden order: the manifest is complete before the values are written."""
    reach, points.reach = points.reach, lambda name: None
    pending = write_tensors(root, step, state_of(value), {"value": value})
    points.reach = reach
    die_at(point)
    folder = os.path.join(root, f"step-{step:08d}", pending.manifest.folder)
    (name,) = os.listdir(folder)
    with open(os.path.join(folder, name), "r+b") as file:
        values = file.read()
        file.seek(0)
        file.truncate()
        points.reach("checkpoint.begin")
        with open(os.path.join(root, f"step-{step:08d}", MANIFEST_NAME), "wb") as manifest:
            manifest.write(dump(pending.manifest))
        points.reach("checkpoint.manifest")
        file.write(values[: len(values) // 2])
        file.flush()
        points.reach("checkpoint.tensors")
        file.write(values[len(values) // 2 :])


def write_in_place(root, step, value, point):
    """A forbidden method: the values of the old checkpoint are overwritten."""
    reach, points.reach = points.reach, lambda name: None
    pending = write_tensors(root, step, state_of(value), {"value": value})
    points.reach = reach
    die_at(point)
    here = os.path.join(root, f"step-{step:08d}")
    with open(os.path.join(here, MANIFEST_NAME)) as file:
        old = json.load(file)["folder"]
    with open(os.path.join(here, pending.manifest.folder, "part-00000.safetensors"), "rb") as file:
        values = file.read()
    with open(os.path.join(here, old, "part-00000.safetensors"), "r+b") as file:
        file.write(values)
        file.flush()
        points.reach("checkpoint.tensors")
    with open(os.path.join(here, MANIFEST_NAME), "wb") as file:
        file.write(dump(dataclasses.replace(pending.manifest, folder=old)))
        points.reach("checkpoint.manifest")


def save_for_ever(root, pipe, parts, keep):
    """Save one step after another, report complete ones, remove old ones."""
    step = newest_intact(root) or 0
    while True:
        step += 1
        pending = [
            write(root, step, take(state_of(step), part, parts), {"value": step}, token=f"t{os.getpid()}")
            for part in range(parts)
        ]
        pending[0].commit(0)
        pipe.send(step)
        if step > keep:
            remove(root, step - keep)


def save_again(root, step, times, values):
    """Save the same step again and again, with another value each time."""
    for _ in range(times):
        for value in values:
            write_tensors(root, step, state_of(value), {"value": value}).commit(0)


def save_with_small_files(root, size_bytes, pipe):
    """Save with a limit on file sizes, and report the result."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
    try:
        write_tensors(root, 20, state_of(2), {"value": 2}).commit(0)
        pipe.send("fine")
    except CheckpointError as error:
        pipe.send(str(error))
