"""The epochs that a script asks for: it begins at that of the checkpoint, instead of passing through the earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from holdfast.data.loader import DataSource
from holdfast.data.plan import SamplePlan
from holdfast.errors import ScriptError
from holdfast.session.opened import OpenedLoop
from holdfast.state.context import JobContext, LoopState, ScriptEpoch


def loading_loop(job: JobContext) -> OpenedLoop | None:
    """Return a loop without a step, before the first one, in which all workers load the state to resume from.

    None if this is no resume, or the state was loaded before.
    """
    resumes = job.settings.resume or job.rebuilds.current is not None
    if not resumes or not job.comm.members or job.loops.number or job.loops.loaded is not None or job.step:
        return None
    job.loops.number = -1
    plan = SamplePlan(
        num_samples=1,
        batch_size=1,
        first_epoch=0,
        epochs=0,
        seed=job.settings.seed,
        shuffle=False,
        drop_last=False,
        slices=1,
        members=job.first_members[:1],
        split=job.settings.split,
        batch=job.settings.batch,
    )
    return OpenedLoop(job, plan, DataSource(()))


def epochs_left(job: JobContext, count: int, end_loop: Callable[[], None]) -> Iterator[int]:
    """Yield the numbers of the epochs that are left, once the state to resume from is loaded.

    Args:
        job: The job context.
        count: Epochs that the script asks for.
        end_loop: Ends a loop that the script has left.
    """
    loops = job.loops
    call, loops.calls, loops.past = loops.calls, loops.calls + 1, None
    begins = _resumed(loops, call) if job.comm.members else _of_members(job)
    first = 0
    if begins is not None and begins.call == call:
        loops.number, loops.epoch, loops.offset, first = begins.loop, begins.first_epoch, 0, begins.number
    elif begins is not None and begins.call > call:
        first = count
    try:
        for number in range(first, count):
            loops.script_epoch = ScriptEpoch(call, number, loops.number, loops.epoch)
            yield number
            end_loop()
            _check_counted(loops, number, loops.number - loops.script_epoch.loop)
    finally:
        loops.past = (call, count)  # also if the script has left them; its last loop may not have ended yet


def begin_loop(loops: LoopState) -> None:
    """Note, at the start of a loop, if it is the first one after the epochs that the script has asked for: none is left."""
    if loops.past is not None:
        loops.script_epoch, loops.past = ScriptEpoch(*loops.past, loops.number, loops.epoch), None


def _check_counted(loops: LoopState, number: int, trained: int) -> None:
    if loops.is_counted_once and trained != 1:
        raise ScriptError(
            f"the checkpoint was saved by a script that did not ask for its epochs, and epoch {number} has {trained} training"
            " loops instead of one, so the epoch of the checkpoint is not known: resume once with the script that saved it,"
            " or start in an empty directory"
        )
    loops.is_counted_once = False


def _resumed(loops: LoopState, call: int) -> ScriptEpoch | None:
    """Return the epoch of the loaded checkpoint."""
    if loops.loaded is None:
        return None
    info = loops.loaded.info
    if "script_epoch" in info:
        return ScriptEpoch(**info["script_epoch"])
    loops.is_counted_once = True  # an epoch must be one loop then
    first_epoch = info.get("first_epoch_of_loop", info["loop"])
    return ScriptEpoch(call, info["loop"] - loops.number, info["loop"], first_epoch)


def _of_members(job: JobContext) -> ScriptEpoch | None:
    """Return, on a newcomer, the epoch that the members are in."""
    epoch = json.loads(job.comm.wanted_platform() or "{}").get("epoch")
    return None if epoch is None else ScriptEpoch(**epoch)
