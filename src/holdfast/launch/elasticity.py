"""Elasticity: starts newcomers, asks workers to leave, and applies requests to the running job."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping
from typing import Any

from holdfast.base.system_errors import refusal
from holdfast.errors import ConfigError, StoreLost
from holdfast.launch.control import FROM_DASHBOARD, ControlRequest, append, check
from holdfast.launch.fleet.base import JobStart
from holdfast.launch.record_bus import RecordBus, RunState
from holdfast.launch.supervise.attempt import JobAttempt
from holdfast.records.paths import requests_path
from holdfast.records.types import ActionRequested


class ElasticWorkers:
    """Replaces failed workers, and scales the job on request."""

    def __init__(self, run: RunState, bus: RecordBus) -> None:
        self._run = run
        self._bus = bus
        self._requested = ControlRequest(run.paths.run_dir, run.view.print_line)
        self._leaving: set[int] = set()
        """Workers that are to leave, and could not be told yet: they have only begun to start."""

    def begin(self, start: JobStart) -> None:
        """Prepare for a start of the job. If it began without this node, offer the node's workers as newcomers."""
        run = self._run
        run.population.begin_again(max(run.state.highest, *start.ranks) + 1)
        self._leaving.clear()
        if run.fleet.is_late:
            run.fleet.is_late = False
            run.population.ask(run.job.settings.workers + run.job.settings.spares, run.clock.now_s())
            run.view.print_line(f"node {run.job.node_rank} is back: its workers join as newcomers")

    def start_newcomers(self, attempt: JobAttempt) -> None:
        """Start the newcomers that are due."""
        run = self._run
        for due in run.population.due(run.clock.now_s()):
            try:
                rank = run.fleet.free_number(due)
            except StoreLost:  # detected at the next check
                return
            try:
                attempt.add(rank)
            except OSError as error:  # those that train go on; a replacement is tried again later
                run.view.print_line(f"rank {rank} cannot be started: {refusal(error) or error}")
                run.population.died(rank, run.clock.now_s())
                continue
            run.files.follow([rank], [rank])
            run.state.wait_for(rank)

    def answer_requests(self, attempt: JobAttempt) -> None:
        """Apply requests that were made on this node or on another."""
        self._tell_to_leave(attempt)
        fleet = self._run.fleet
        with contextlib.suppress(StoreLost):  # detected at the next check
            for changes in self._requested.new():
                fleet.request(changes | {"node": self._run.job.node_rank})
            for changes in fleet.requests():
                self._change(attempt, changes)
            self._leaving.update(fleet.is_leaving())
            self._tell_to_leave(attempt)

    def _change(self, attempt: JobAttempt, changes: dict[str, Any]) -> None:
        own_node = self._run.job.node_rank
        node, is_from_dashboard = changes.pop("node", own_node), changes.pop(FROM_DASHBOARD, False)
        try:
            check(changes, self._run.running)
        except ConfigError as error:
            self._run.view.print_line(f"request rejected: {error!s:.300}")
            return
        if is_from_dashboard and node == own_node:
            self._bus.note(_action(changes))
        if "workers" in changes and node == own_node:
            self._scale(attempt, changes["workers"])
        append(requests_path(self._run.paths.run_dir), changes)

    def _scale(self, attempt: JobAttempt, wanted: int) -> None:
        """Start missing workers on this node, or send SIGTERM to surplus workers, highest ranks first."""
        run = self._run
        there = {*run.state.living(), *run.state.waiting}
        wanted += run.job.nnodes * run.job.settings.spares
        for rank in run.population.scale(sorted(there), wanted, run.clock.now_s()):
            if rank in attempt.processes:
                self._leaving.add(rank)
            else:
                run.fleet.ask_to_leave(rank)
        self._tell_to_leave(attempt)

    def _tell_to_leave(self, attempt: JobAttempt) -> None:
        """Send SIGTERM to the workers that are to leave; again, at the next check, to those that have not started yet."""
        there = {*self._run.state.living(), *self._run.state.waiting}
        self._leaving = {rank for rank in self._leaving & there if not attempt.send(rank, signal.SIGTERM)}


def _action(changes: Mapping[str, Any]) -> ActionRequested:
    """Return the record of changes that were requested through a dashboard."""
    action = "scale" if "workers" in changes else "save" if "save" in changes else "set"
    return ActionRequested(action=action, values=json.dumps({} if action == "save" else dict(changes)))
