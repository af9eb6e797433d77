"""State that survives from one application to the next in the same process: the job context, and what both rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.config import Settings
from holdfast.data.plan import SamplePlan
from holdfast.errors import ConfigError, ScriptError
from holdfast.models.step import Step
from holdfast.recovery.registry import strategy_class
from holdfast.state.context import JobContext, RebuildInfo


@dataclass(slots=True)
class Application:
    """The application that this process runs."""

    is_built_by_reinit: bool = False  # `holdfast.reinit` has called `main`
    makes_sessions: bool = False  # the application has created a session, which writes the records of this process
    has_session: bool = False  # it has created a session that can be rebuilt
    job: JobContext | None = None  # of the application that was torn down, until the next session takes it
    # replaces training, for tools that only inspect it: is called with the model, the plan, the dataset and the collate
    # function, and yields steps
    looks: Callable[[Any, SamplePlan, Any, Any], Iterator[Step]] | None = None


application = Application()


def hand_over(job: JobContext, rebuilding: RebuildInfo) -> None:
    """Keep ``job`` for the session that is built next, which starts again with the first loop."""
    job.beacon.publish_busy(busy=True)  # for as long as the script's own code takes
    job.rebuilds.count += 1
    job.rebuilds.current = rebuilding
    job.committed.begin_again()
    job.loops.begin_again()
    application.job = job


def take_over() -> JobContext | None:
    """Return the job context of the previous application, if there was one."""
    job, application.job = application.job, None
    if job is not None and job.rebuilds.current is not None:
        job.beacon.publish_busy(busy=False)
        job.rebuilds.current.connected_s = job.clock.now_s()
    return job


def note_session(settings: Settings, *, is_replicated: bool) -> None:
    """Check that the application can be rebuilt with the session that it creates now.

    Raises:
        ConfigError: if the model is split, so that no worker holds all of it at a fault.
        ScriptError: if no ``holdfast.reinit`` would call ``main`` again, or there are two sessions.
    """
    if not strategy_class(settings.strategy).rebuilds:
        return
    if not application.is_built_by_reinit:
        raise ScriptError(
            "strategy reinit rebuilds the application by calling main: put the script into a function and end it with"
            " holdfast.reinit(main)"
        )
    if not is_replicated and settings.reinit_from != "checkpoint":
        raise ConfigError(
            f"reinit_from must be checkpoint for a Pipeline or Sharded model, got {settings.reinit_from}: a snapshot "
            "at the fault would lack the parts of the failed workers"
        )
    if application.has_session:
        raise ScriptError("strategy reinit allows one holdfast.Session in main, and this is the second")
    application.has_session = True
