"""Live reconfiguration: changes requested in a file and applied by all workers before the same step.

The user or a tool appends lines to ``requests.jsonl``. When the lead sees a new line, it says so in the commit vote.
Before the next step the worker that has read the most lines broadcasts the new ones, and they take effect once every
worker knows that all workers have them. Each line is applied once; its number is its position in the file. The count of
applied lines is part of the training state: a worker that loads an older checkpoint replays the later lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.base.options import MAX_REQUEST, is_finite, is_whole, request_in
from holdfast.comm import broadcast_bytes
from holdfast.data.position import DataPosition
from holdfast.errors import ConfigError
from holdfast.models.trainable import Trainable
from holdfast.records.paths import requests_path
from holdfast.records.types import SettingChanged
from holdfast.recovery import Strategy, make_strategy
from holdfast.recovery.registry import strategy_class, strategy_names
from holdfast.state.context import JobContext

_MOST_RANKS = 1 << 20


class LiveConfig:
    """Checks for change requests and applies them.

    Args:
        job: The job context.
        trainable: Receives a new learning rate.
        position: Receives a new mini-batch size, and each worker's share of it.
        set_strategy: Receives a new strategy.
    """

    def __init__(
        self, job: JobContext, trainable: Trainable, position: DataPosition, set_strategy: Callable[[Strategy], None]
    ) -> None:
        self._job = job
        self._trainable = trainable
        self._position = position
        self._set_strategy = set_strategy
        self._live = job.live
        run_dir = job.settings.run_dir
        self._path = requests_path(Path(run_dir)) if run_dir else None
        self._seen_bytes = 0
        self._lines: list[str] = []
        self._requests: list[tuple[int, str]] | None = None

    def are_due(self) -> bool:
        """Return whether there is a line that was not applied yet; costs one ``stat`` of the file."""
        self._read()
        return len(self._lines) > self._live.applied

    def fetch(self) -> None:
        """Fetch new requests, all workers at the same time, and keep them for :meth:`apply`.

        Raises:
            PeerFailed: if a worker died.
        """
        comm = self._job.comm
        me = comm.local_ranks[0]
        best, least = comm.maximum([len(self._lines) * _MOST_RANKS - me, -self._live.applied])
        count = -(-best // _MOST_RANKS)
        text = broadcast_bytes(comm, json.dumps(self._lines[-least:count]).encode(), count * _MOST_RANKS - best)
        self._requests = list(enumerate(json.loads(text), start=-least))

    def apply(self) -> None:
        """Apply the requests that :meth:`fetch` fetched."""
        requests, self._requests = self._requests, None
        for number, line in requests or ():
            if number >= self._live.applied:
                self._live.applied = number + 1
                self._make(number, line)

    def state(self) -> dict[str, Any]:
        """Return all changes made so far, as plain JSON."""
        live = self._live
        return {
            "job": self._job.settings.origin_s,
            "taken": live.applied,
            "place": dict(live.slicing),
            "strategy": live.strategy,
            "checkpoint_every": live.checkpoint_every,
            "checkpoint_auto": live.checkpoint_auto,
        }

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Adopt a state returned by :meth:`state`. If it is another job's, only the mini-batch size is used."""
        live = self._live
        if state["job"] != self._job.settings.origin_s:
            self._change_slicing({k: value for k, value in state["place"].items() if k == "batch_size"})
            return
        live.applied = state["taken"]
        self._change_slicing(dict(state["place"]))
        if state["strategy"] != live.strategy:
            self._strategy(state["strategy"])
        how_often = (state["checkpoint_every"], state["checkpoint_auto"])
        if how_often != (live.checkpoint_every, live.checkpoint_auto):
            self._set_interval(*how_often)

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size != self._seen_bytes:
            self._seen_bytes = size
            lines = self._path.read_bytes().split(b"\n")[:-1]  # an incomplete line is read on the next call
            self._lines = [line.decode(errors="replace")[: MAX_REQUEST + 1] for line in lines]

    def _make(self, number: int, line: str) -> None:
        try:
            request = _checked(request_in(line))
        except ConfigError as error:
            if self._job.is_lead:
                sys.stderr.write(f"holdfast: line {number + 1} of {requests_path(Path()).name} is skipped: {error}\n")
            return
        for name, value in request.items():
            if name == "strategy" and (why := self._why_not(value)):
                if self._job.is_lead:
                    sys.stderr.write(f"holdfast: --strategy {value} {why}; the strategy is unchanged\n")
                continue
            _CHANGES[name][1](self, value)
            self._job.log.write(SettingChanged(name=name, value=json.dumps(value)))

    def _why_not(self, strategy: str) -> str:
        """Return why the job cannot switch to a strategy, "" if it can."""
        if self._trainable.kind in strategy_class(strategy).refused:
            return "does not support a model that is split"
        if self._job.settings.mirror_every > 1:
            return "cannot be combined with --mirror-every above 1, which only partial can recover from"
        return ""

    def _change_slicing(self, cut: dict[str, Any]) -> None:
        self._live.slicing = cut
        self._position.change(cut)

    def _strategy(self, name: str) -> None:
        self._live.strategy = name
        self._set_strategy(make_strategy(name, min_workers=self._job.settings.min_workers))

    def _set_interval(self, steps: int, automatic: bool) -> None:
        self._live.checkpoint_every, self._live.checkpoint_auto = steps, automatic
        self._job.checkpoints.set_interval(steps, automatic=automatic)


def _are_speeds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        len(rank) < 10 and rank.isdecimal() and is_finite(speed) and speed > 0 for rank, speed in value.items()
    )


def _is_count(value: Any) -> bool:
    return is_whole(value, 1)


def _is_strategy(value: Any) -> bool:
    return value in strategy_names() and strategy_class(value).can_change_live


_CHANGES: dict[str, tuple[Callable[[Any], bool], Callable[[LiveConfig, Any], None]]] = {
    "lr": (is_finite, lambda self, value: self._trainable.set_learning_rate(value)),
    "batch_size": (_is_count, lambda self, value: self._change_slicing(self._live.slicing | {"batch_size": value})),
    "strategy": (_is_strategy, LiveConfig._strategy),
    "checkpoint_every": (
        lambda value: is_whole(value, 0),
        lambda self, value: self._set_interval(value, automatic=False),
    ),
    "workers": (_is_count, lambda self, value: self._change_slicing(self._live.slicing | {"workers": value})),
    "speeds": (_are_speeds, lambda self, value: self._change_slicing(self._live.slicing | {"speeds": dict(value)})),
    "save": (lambda value: value is True, lambda self, _: self._job.checkpoints.request()),
}
"""Of each change, which values are allowed, and what it does. The launcher checks more, with messages; this is for lines
written by another tool."""


def _checked(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request if every change in it is valid.

    Raises:
        ConfigError: if one is not.
    """
    for name, value in request.items():
        if name not in _CHANGES:
            raise ConfigError(f"{name:.60} cannot be changed while a job runs; {', '.join(_CHANGES)} can")
        if not _CHANGES[name][0](value):
            raise ConfigError(f"{name} cannot be set to {value!a:.60}")
    return request
