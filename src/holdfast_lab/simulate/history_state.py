"""The state of one history. All fields are numbers, because records of an array have the same. Times are nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

RUN, DETECT, RECOVER, START, WAIT, OVER = range(6)
"""Phases. ``RUN``: the members train. ``DETECT``: a member has failed, and not all survivors know. ``RECOVER``: the
members regroup and execute a decision, or admit newcomers. ``START``: the launcher restarts the job. ``WAIT``: too few
workers are up to start it. ``OVER``: the job is done, or the horizon is reached."""

NEVER_ADMITTED = -1
"""An admission before all others, when no worker was ready yet."""
FAR = 1 << 61
"""Later than the end of any simulation, but small enough to add to."""


@dataclass(slots=True)
class HistoryState:
    """The state of one history.

    Its clock:

    Args:
        next_down: The outage that begins next.
        next_ready: The outage after which a new worker is ready next, as an index of ``by_ready``.
        phase: One of those above.
        since: Time up to here is already assigned to a part.
        wake: The scheduled end of the phase.
        at_once: The phase has no duration: it ends before any other event at the same time.
        ends: When training ends if undisturbed.

        available: Workers that are up.
        members: Those of them that are members.
        members_since: Time of the last change of ``members``.
        member_ns: Members, integrated over time until then.
        admitted: Time of the last admission.
        admitting: Begin of the current admission of newcomers, :data:`NEVER_ADMITTED` without one.
        newcomers: Workers being admitted.
        killed: Members that failed since training last resumed.

        is_down: No member trains or recovers: the launcher restarts the job now or later.
        is_admission: Nothing failed; newcomers are being admitted.
        case: The members' phase at the failure, a :class:`~holdfast_lab.simulate.decision_table.FailureCase`.
        decision: The column of the decision table.
        sums_done: Completed all-reduces of the step in progress; -1 if its computation was not finished.
        from_snapshot: The state is in a snapshot: loading loses nothing more.
        regroup_takes, undo_takes, restart_takes, load_takes, save_takes: Duration of each stage of the recovery.

        start: Begin of the segment: consecutive steps, with checkpoints in between.
        first: The step in progress then.
        into: Elapsed time of that step then.
        step_takes: Duration of a step.
        compute: Duration of a step before its first all-reduce.
        waits: Time in a step from which all wait for the optimizer,
        waited: and at which they have.
        weight_each: What a step counts.
        before: Steps from the checkpoint before the segment to its begin.
        hold: How long a checkpoint holds training.
        lag: From then until it is complete.
        works: Work from the begin of the segment to its first checkpoint.
        cycle: From the end of one checkpoint to the end of the next.

        step: The step in progress at the begin of the segment.
        weight: What the steps before it count.
        ran: Work in them and in it.
        attempt: Work in it alone.
        lost: Work that was discarded.
        held: How long training was held for checkpoints.
        safe_step, safe_weight, safe_ran: The newest complete checkpoint: the steps before it, their weight and work.
        written_step, written_weight, written_ran: The one that is being written.
        written_at: When that is complete; :data:`FAR` without one.

        in_save, in_detect, in_regroup, in_load, in_restart, in_rejoin, in_wait: Time of each part, so far.
        failures, lost_workers, joins, starts, lost_slices, total_ns, finished: As in
            :class:`~holdfast_lab.simulate.Outcome`.
    """

    next_down: int = 0
    next_ready: int = 0
    phase: int = WAIT
    since: int = 0
    wake: int = 0
    at_once: bool = False
    ends: int = 0

    available: int = 0
    members: int = 0
    members_since: int = 0
    member_ns: float = 0.0
    admitted: int = NEVER_ADMITTED
    admitting: int = NEVER_ADMITTED
    newcomers: int = 0
    killed: int = 0

    is_down: bool = True
    is_admission: bool = False
    case: int = 0
    decision: int = 0
    sums_done: int = 0
    from_snapshot: bool = False
    regroup_takes: int = 0
    undo_takes: int = 0
    restart_takes: int = 0
    load_takes: int = 0
    save_takes: int = 0

    start: int = 0
    first: int = 0
    into: int = 0
    step_takes: int = 0
    compute: int = 0
    waits: int = 0
    waited: int = 0
    weight_each: int = 0
    before: int = 0
    hold: int = 0
    lag: int = 0
    works: int = 0
    cycle: int = 0

    step: int = 0
    weight: int = 0
    ran: int = 0
    attempt: int = 0
    lost: int = 0
    held: int = 0
    safe_step: int = 0
    safe_weight: int = 0
    safe_ran: int = 0
    written_step: int = 0
    written_weight: int = 0
    written_ran: int = 0
    written_at: int = FAR

    in_save: int = 0
    in_detect: int = 0
    in_regroup: int = 0
    in_load: int = 0
    in_restart: int = 0
    in_rejoin: int = 0
    in_wait: int = 0
    failures: int = 0
    lost_workers: int = 0
    joins: int = 0
    starts: int = 0
    lost_slices: int = 0
    total_ns: int = 0
    finished: bool = False
