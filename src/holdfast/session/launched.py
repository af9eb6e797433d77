"""A session in processes that another launcher started, such as torchrun or srun: they join each other.

When one dies, the others continue if the launcher leaves them alone, and end otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from holdfast.base.options import is_set
from holdfast.base.side_work import say
from holdfast.comm.launchers import LaunchedGroup, chosen, own_group, sole_process
from holdfast.comm.start_wait import StartLimit, named
from holdfast.config import Settings
from holdfast.records.types import Finished, Record, Recovered, RunStarted

if TYPE_CHECKING:
    from holdfast.comm.joining import JoinedGroup, SoleProcess


_joined: dict[LaunchedGroup, JoinedGroup] = {}


def as_launched(settings: Settings) -> Settings:
    """Return the settings with rank, size and fabric of the processes that another launcher started, if it did."""
    group = _group(settings)
    if group is None:
        return settings
    ranks = ",".join(map(str, range(group.size)))
    return dataclasses.replace(settings, fabric="gloo", workers=group.size, rank=group.rank, ranks=ranks)


def _group(settings: Settings) -> LaunchedGroup | None:
    if settings.store or chosen(settings.fabric) != "gloo":
        return None
    return own_group()


def join_launched(settings: Settings) -> tuple[Settings, JoinedGroup | SoleProcess | None]:
    """Join the other processes; return settings that connect to them, and whether to resume. None without such a group.

    Args:
        settings: From :func:`as_launched`.

    Raises:
        StoreLost: if they do not all arrive.
    """
    if not settings.fabric and settings.checkpoint_dir and (sole := sole_process(os.environ)) is not None:
        from holdfast.comm.joining import SoleProcess

        alone = SoleProcess(sole)
        return dataclasses.replace(settings, resume=settings.resume or alone.has_begun), alone
    if settings.fabric != "gloo" or settings.store:
        return settings, None
    group = own_group()
    if group is None or group.rank != settings.rank:
        return settings, None
    joined = _join(group, settings)
    resumes = settings.resume or (joined.has_begun and bool(settings.checkpoint_dir))
    settings = dataclasses.replace(settings, store=joined.url, token=joined.token, resume=resumes)
    settings = _without_missing(settings, joined)
    if group.rank == 0:
        say(_announcement(joined, settings))
    return settings, joined


def _join(group: LaunchedGroup, settings: Settings) -> JoinedGroup:
    """Join the other processes, once in each process."""
    if group not in _joined:
        from holdfast.comm.joining import JoinedGroup
        from holdfast.comm.surviving import SurvivingGroup

        limit = StartLimit()
        if is_set(settings, "start_timeout_s"):
            limit = dataclasses.replace(limit, limit_s=settings.start_timeout_s)
        if is_set(settings, "min_workers"):
            limit = dataclasses.replace(limit, least=settings.min_workers)
        _joined[group] = (SurvivingGroup if group.leaves_survivors else JoinedGroup)(group, limit)
    return _joined[group]


def _without_missing(settings: Settings, joined: JoinedGroup) -> Settings:
    """Return the settings of the processes that are there. The number of slices, and so the bits, is that of all."""
    size, ranks = joined.group.size, joined.ranks
    if len(ranks) == size:
        return settings
    slices = settings.slices if settings.slices or settings.auto_slices >= 0 else size
    return dataclasses.replace(settings, workers=len(ranks), ranks=",".join(map(str, ranks)), slices=slices)


def _announcement(joined: JoinedGroup, settings: Settings) -> str:
    """Return a line that says what these processes can survive."""
    group = joined.group
    head = f"{len(joined.ranks)} processes of {group.launcher} have joined; {_what_survives(joined)}"
    saves = settings.checkpoint_every > 0 or settings.checkpoint_auto
    if not settings.checkpoint_dir:
        how = "start from the beginning, because there is no checkpoint directory (HOLDFAST_CHECKPOINT_DIR)"
    elif not saves:
        how = (
            f"resume from what SIGTERM saved in {settings.checkpoint_dir} (HOLDFAST_CHECKPOINT_EVERY saves more often)"
        )
    else:
        how = f"resume from the newest checkpoint in {settings.checkpoint_dir}"
    if group.restarts_all:
        return f"{head}, and those that {group.launcher} starts again {how}"
    return f"{head}; started again with HOLDFAST_RESUME=1, they {how}"


def _what_survives(joined: JoinedGroup) -> str:
    group = joined.group
    if not group.leaves_survivors:
        return "when one fails, all end"
    options = " (--no-kill --kill-on-bad-exit=0 --wait=0)" if group.launcher == "srun" else ""
    survives = f"when one dies, the others continue, if {group.launcher} leaves them alone{options}"
    if len(joined.hosts) == 1:
        return f"{survives}; without rank 0, which hosts the membership store, all end"
    return f"{survives}; the membership store is on {named(joined.hosts)}, most of which must be alive"


class LaunchReport:
    """Takes the records of this process: prints where training resumes and how it ended.

    Args:
        joined: The group of this process.
    """

    def __init__(self, joined: JoinedGroup | SoleProcess) -> None:
        self._joined = joined
        self._is_told = False
        self._lead = 0

    def write(self, record: Record) -> None:
        """Take one record."""
        if isinstance(record, Recovered):
            self._lead = min(record.survivors)
        if self._joined.group.rank != self._lead:
            return
        if isinstance(record, RunStarted):
            self._joined.note_begun()
            if record.step:
                say(f"training resumes at step {record.step}")
        elif isinstance(record, Finished) and not self._is_told:
            self._is_told = True
            say(f"{record.outcome} before step {record.step}, sha256 {record.sha256}")
