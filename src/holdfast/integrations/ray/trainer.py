"""The trainer: reserves places for the nodes, hosts their store, and returns what the job left."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.errors import ConfigError, TrainingFailed
from holdfast.integrations.ray.configs import JobScale, RunConfig, ScalingConfig, read_run, read_scaling
from holdfast.integrations.ray.function import pack
from holdfast.integrations.ray.jobs import make_job
from holdfast.integrations.ray.node import NodeOutcome
from holdfast.integrations.ray.supervisor import NodeTask, Supervisor
from holdfast.launch.job import Job
from holdfast.membership import Hub, open_store
from holdfast.observe.terminal.views import PlainView

_RESUME = "; resume with: "
"""Precedes a command of ``holdfast run`` in messages."""
_say = PlainView().print_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job left; like ``ray.train.Result``.

    Args:
        metrics: Last value of each metric of ``step.log`` and ``session.log``, and ``loss``.
        checkpoint: Directory or URL of the last checkpoint; None without one.
        error: Why the job failed; None if it is done.
        path: Directory or URL of the run; None if it has none.
        report: Content of ``report.json``.
    """

    metrics: dict[str, float | None] = field(default_factory=dict)
    checkpoint: str | None = None
    error: Exception | None = None
    path: str | None = None
    report: dict[str, Any] = field(default_factory=dict)


class HoldfastTrainer:
    """Trains on the nodes of a Ray cluster, and continues when nodes are lost.

    Args:
        train_fn: What each worker runs, with a :class:`holdfast.Session`: a function, without arguments or with the
            dict ``train_loop_config``; or the path of a script.
        scaling_config: Workers and their resources.
        run_config: Name and place of the run; by default nothing is written.
        train_loop_config: Argument of the function.
        args: ``sys.argv[1:]`` of a script.
        workers_per_node: Workers that share one launcher, and one bundle of Ray's placement group. Ray places each
            such node as a whole, and loses it as a whole.
        options: Options of ``holdfast run``, by the names of their fields, such as ``{"checkpoint_every": 100}``.
            Variables ``HOLDFAST_*`` of the driver apply, too.
        rdzv: ``etcd://HOST:PORT[,HOST:PORT...]/JOB`` for a store outside of Ray. By default this process hosts it, so
            the job ends with this process, as everything that a driver of Ray has started does.

    Raises:
        ConfigError: if a value is not allowed; the message names it.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any] | str | os.PathLike[str],
        scaling_config: Any = None,
        run_config: Any = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        workers_per_node: int = 1,
        options: Mapping[str, Any] | None = None,
        rdzv: str = "",
    ) -> None:
        if callable(train_fn) and args:
            raise ConfigError("args are for a script: a function takes train_loop_config")
        if not callable(train_fn) and train_loop_config is not None:
            raise ConfigError("train_loop_config is for a function: a script takes args")
        self._scale = read_scaling(scaling_config or ScalingConfig(), workers_per_node)
        self._run = run = read_run(run_config or RunConfig())
        self._function = pack(train_fn, train_loop_config) if callable(train_fn) else None
        script = None if callable(train_fn) else Path(train_fn)
        self._job = make_job(script, args, self._scale, {**run.options, **(options or {})}, run.folder, rdzv)

    def fit(self) -> Result:
        """Train, and return what the job left.

        Ctrl-C makes all workers save and stop; a second one ends them at once.

        Raises:
            TrainingFailed: if the job has failed or was stopped, or Ray has too few resources; its ``result`` has what
                the job left.
        """
        if not ray.is_initialized():
            ray.init()
        if ray_client.is_connected() and not self._job.rdzv:
            raise ConfigError(
                "a driver that is connected by ray:// cannot host the store, which the nodes must reach: "
                "start the script by `ray job submit`, or give rdzv='etcd://...'"
            )
        with _places(self._scale, self._job.rdzv_timeout_s) as places:
            outcome = self._train(places)
        return self._result(outcome)

    def _train(self, places: Sequence[PlacementGroupSchedulingStrategy]) -> NodeOutcome:
        """Run the job, again from the newest checkpoint if all nodes were lost at the same time; return how it ended."""
        job, folder = self._job, self._job.settings.checkpoint_dir
        for restarts in itertools.count():
            outcome, has_begun = self._run_once(job, places)
            if outcome is not None:
                return outcome
            if restarts >= job.max_restarts:
                break
            _say("all nodes were lost at the same time: the job starts again when Ray has placed them")
            resume = job.settings.resume or (has_begun and bool(folder))
            job = replace(job, settings=replace(job.settings, resume=resume))
        message = f"all nodes were lost at the same time, and max_restarts is {job.max_restarts}"
        saved = f". Checkpoints are in {folder}{_RESUME}" if folder else ""
        return NodeOutcome(exit_code=1, message=message + saved)

    def _run_once(
        self, job: Job, places: Sequence[PlacementGroupSchedulingStrategy]
    ) -> tuple[NodeOutcome | None, bool]:
        """Run the job with a store of its own; return how it ended, None if all nodes were lost, and whether it trained."""
        with contextlib.ExitStack() as stack:
            url, token = stack.enter_context(_hosted_store(job.rdzv, job.node_timeout_s))
            store = open_store(f"{url}/0/launchers", token, lease_s=job.node_timeout_s)
            stack.enter_context(contextlib.closing(store))
            task = NodeTask(
                job=replace(job, rdzv=url, settings=replace(job.settings, token=token)),
                scale=self._scale,
                function=self._function,
                env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},  # Ray's own choice might change bits
                folder=os.getcwd(),
                runtime_env=self._run.runtime_env,
            )
            supervisor = stack.enter_context(contextlib.closing(Supervisor(task, places, store, _say)))
            stack.enter_context(_stops_on_interrupt(supervisor))
            outcome = supervisor.run()
            return outcome, store.get("slices") is not None

    def _result(self, outcome: NodeOutcome) -> Result:
        report = outcome.report
        result = Result(
            metrics=dict(report.get("metrics") or {}),
            checkpoint=outcome.checkpoint or None,
            path=self._run.folder or None,
            report=report,
        )
        if outcome.is_done:
            return result
        message, is_saved, _ = outcome.message.partition(_RESUME)
        error = TrainingFailed(message + ("; resume with options={'resume': True}" if is_saved else ""))
        error.result = replace(result, error=error)
        if outcome.traceback:
            error.add_note(outcome.traceback.rstrip())
        raise error


@contextlib.contextmanager
def _places(scale: JobScale, timeout_s: float) -> Iterator[list[PlacementGroupSchedulingStrategy]]:
    """Reserve the places of the first nodes together, and ask for those of more nodes one by one.

    Raises:
        TrainingFailed: if Ray cannot place the first nodes in time.
    """
    bundle = dict(scale.bundle)
    groups: list[PlacementGroup] = []
    try:
        groups.append(placement_group([bundle] * scale.min_nodes, strategy=scale.strategy))
        if not groups[0].wait(timeout_s):
            free = {name: amount for name, amount in ray.available_resources().items() if ":" not in name}
            there = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in bundle)
            raise TrainingFailed(
                f"Ray had no room for {scale.min_nodes} nodes with {bundle} each within {timeout_s:g} s (rdzv_timeout_s); "
                f"free in the cluster: {there}. Ask for fewer workers or resources, or add machines"
            )
        more = scale.max_nodes - scale.min_nodes
        groups += [placement_group([bundle]) for _ in range(more)]
        first = [PlacementGroupSchedulingStrategy(groups[0], index) for index in range(scale.min_nodes)]
        yield first + [PlacementGroupSchedulingStrategy(group, 0) for group in groups[1:]]
    finally:
        for group in groups:
            remove_placement_group(group)


@contextlib.contextmanager
def _hosted_store(rdzv: str, lease_s: float) -> Iterator[tuple[str, str]]:
    """Host the store of a run in this process, or choose keys of its own in etcd; yields its URL and its token."""
    if not rdzv:
        token = secrets.token_hex(16)
        with Hub(token, ray.util.get_node_ip_address(), lease_s=lease_s) as hub:
            yield f"holdfast://{hub.address}", token
        return
    url, token = f"{rdzv}-{secrets.token_hex(4)}", os.environ.get("HOLDFAST_TOKEN", "")
    try:
        yield url, token
    finally:
        with contextlib.closing(open_store(url, token, lease_s=lease_s)) as store:
            for part in ("0/", "runs/"):
                store.delete(part)


@contextlib.contextmanager
def _stops_on_interrupt(supervisor: Supervisor) -> Iterator[None]:
    """Make the first Ctrl-C stop the job in order; outside of the main thread, where none arrives, do nothing."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        _say("stopping: the workers finish their step and save (Ctrl-C to stop immediately)")
        supervisor.stop()

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
