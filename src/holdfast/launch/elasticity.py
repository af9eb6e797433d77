"""Who is started beside the workers that the job began with, who is told to leave, and what else is asked of it."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from holdfast.errors import ConfigError, StoreLost
from holdfast.launch.attempt import Attempt
from holdfast.launch.control import Asked, announce, append, check
from holdfast.launch.nodes import Start
from holdfast.launch.record_bus import Run
from holdfast.records.paths import requests_path


class Crew:
    """Answers deaths and requests with newcomers and with orders to leave. Making it lets others find the job."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._asked = Asked(run.places.run_dir, run.view.say)
        self._running = announce(run.places.run_dir, run.job)

    def begin(self, start: Start) -> None:
        """Hear that the job is started; if it has begun without this node, offer it as many workers as the node would have had."""
        run = self._run
        run.births.begin_again(max(run.judge.highest, *start.ranks) + 1)
        if run.nodes is not None and run.nodes.is_late:
            run.nodes.is_late = False
            run.births.ask(run.job.settings.workers + run.job.settings.spares, run.clock.now_s())
            run.view.say(f"node {run.job.node_rank} comes back: its workers join as newcomers")

    def start_newcomers(self, attempt: Attempt) -> None:
        """Start those whose time has come."""
        run = self._run
        for due in run.births.due(run.clock.now_s()):
            try:
                rank = due if run.nodes is None else run.nodes.free_number(due)
            except StoreLost:  # found at the next look
                return
            run.files.follow([rank], [rank])
            run.judge.wait_for(rank)
            attempt.add(rank)

    def answer_requests(self, attempt: Attempt) -> None:
        """Do what was asked for meanwhile, on this node or another."""
        nodes, job = self._run.nodes, self._run.job
        if nodes is None or job.nnodes == 1:
            for changes in self._asked.new():
                self._change(attempt, changes)
            return
        with contextlib.suppress(StoreLost):  # found at the next look
            for changes in self._asked.new():
                nodes.ask(changes | {"node": job.node_rank})
            for changes in nodes.asked():
                self._change(attempt, changes)
            for rank in nodes.told_to_leave():
                attempt.send(rank, signal.SIGTERM)

    def _change(self, attempt: Attempt, changes: dict[str, Any]) -> None:
        here = self._run.job.node_rank
        node = changes.pop("node", here)
        try:
            check(changes, self._running)
        except ConfigError as error:
            self._run.view.say(f"not changed: {error!s:.300}")
            return
        if "workers" in changes and node == here:
            self._scale(attempt, changes["workers"])
        append(requests_path(self._run.places.run_dir), changes)

    def _scale(self, attempt: Attempt, wanted: int) -> None:
        """Start workers that are missing, on this node; tell those with the highest numbers to leave that are too many."""
        run = self._run
        there = {*run.judge.living(), *run.judge.waiting}
        wanted += run.job.nnodes * run.job.settings.spares
        for rank in run.births.scale(sorted(there), wanted, run.clock.now_s()):
            if rank in attempt.processes:
                attempt.send(rank, signal.SIGTERM)
            elif run.nodes is not None:
                run.nodes.ask_to_leave(rank)
