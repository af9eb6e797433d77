"""Every run of small jobs of the ``torch.distributed`` backend: it regroups by the protocol's sequence, and without one of its lines it breaks."""

import dataclasses
import functools

import pytest

from holdfast.errors import InternalError
from holdfast.recovery import Rollback, Strategy
from holdfast.recovery.messages import (
    Action,
    Agree,
    Agreed,
    ApplyStep,
    BucketReduced,
    Computed,
    ComputeStep,
    DataExhausted,
    DiscardStep,
    Done,
    Event,
    Leave,
    PeerLost,
    Progress,
    ProgressKnown,
    ReduceBucket,
    Revoked,
    ShareProgress,
    Shrunk,
    Started,
    StepApplied,
    StepVoted,
    VoteStep,
)
from holdfast.recovery.regroup import RegroupLine, line_after, order_of
from model.explorer import World, explore


class Collectives:
    """A rank of the backend, as ``distributed/comm_thread.py`` drives it: collectives one at a time, and then the gate.

    To the explorer a collective is a step. Its exchange is a bucket, its last barrier the closing sum, and moving the result to
    where it belongs is applying it. What ranks share is how many collectives are over for them. It takes two sums: how many
    groups the rank with the most has, and then the figures.
    """

    recovers = True
    """A collective that nobody has completed is made again, as inside DDP; otherwise it fails, and the script calls another."""
    has_gate = True
    left_out: RegroupLine | None = None

    def __init__(self, strategy: Strategy, num_buckets: int, *, split: bool, workers: int) -> None:
        assert num_buckets == 1
        assert not split
        self._members = frozenset(range(workers))
        self._failed: frozenset[int] = frozenset()
        self._known: ProgressKnown | None = None
        self._step = 0
        self._completed = 0
        self._line: RegroupLine | None = None
        self._shared = 0
        self._is_at_gate = False

    def key(self) -> tuple[object, ...]:
        known = None if self._known is None else tuple(sorted(self._known.progress.items()))
        progress = (self._step, self._completed, self._failed, self._members)
        return (*progress, self._line, self._shared, known, self._is_at_gate)

    def set_strategy(self, strategy: Strategy) -> None:
        raise AssertionError("there is none")

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, PeerLost):
            return self._regroup(RegroupLine.REVOKE)
        if self._line is not None:
            return self._after(self._line, event)
        match event:
            case Started():
                return [ComputeStep(0)]
            case Computed():
                while self._completed in self._failed:  # it fails here without a message, and the script calls another
                    self._completed += 1
                return [ReduceBucket(self._step, 0)]
            case BucketReduced():
                return [VoteStep(self._step)]
            case StepVoted():
                return [ApplyStep(self._step)]
            case StepApplied():
                self._completed += 1
                self._step += 1
                return [ComputeStep(self._step)]
            case DataExhausted():
                return self._enter_gate()
            case Agreed(value=True):
                return [Leave()]
            case Agreed(value=False):
                return self._regroup(RegroupLine.SHRINK)
            case Done():
                return [ComputeStep(self._step)]
            case _:
                msg = f"{event} cannot happen"
                raise InternalError(msg)

    def _enter_gate(self) -> list[Action]:
        self._is_at_gate = True
        return [Agree(flag=True)] if self.has_gate else [Leave()]

    def _regroup(self, line: RegroupLine) -> list[Action]:
        if line is self.left_out:
            return self._go_on(line_after(line, succeeded=True))
        self._line = line
        return [order_of(line, Progress(self._completed, computed=False))]

    def _after(self, line: RegroupLine, event: Event) -> list[Action]:
        assert isinstance(event, Revoked | Agreed | Shrunk | ProgressKnown), event
        if isinstance(event, ProgressKnown):
            self._shared += 1
            if self._shared == 1:
                return [ShareProgress(Progress(self._completed, computed=False))]
            self._known = event
        self._shared = 0
        return self._go_on(line_after(line, succeeded=event != Agreed(value=False)))

    def _go_on(self, line: RegroupLine | None) -> list[Action]:
        if line is not None:
            return self._regroup(line)
        assert self._known is not None
        top = max(progress.completed for progress in self._known.progress.values())
        lost = self._members - self._known.progress.keys()
        self._members -= lost
        self._line, self._known = None, None
        if lost and not self.recovers:
            self._failed |= {top}  # that nobody has completed, or the next one; at ranks that have yet to call it, too
        if self._is_at_gate:
            return self._enter_gate()
        if top > self._completed:  # somebody has completed it, so this rank has entered its last barrier
            return [ApplyStep(self._step)]
        return [DiscardStep(self._step)]


class Fails(Collectives):
    """A collective that a death interrupts fails, at every survivor alike."""

    recovers = False


class FailsWhereItWasCalled(Fails):
    """Ranks that have yet to call the collective which failed do not hear of it."""

    def _go_on(self, line: RegroupLine | None) -> list[Action]:
        orders = super()._go_on(line)
        if isinstance(orders[0], ApplyStep):
            self._failed = frozenset()
        return orders


def without(line: RegroupLine, kind: type[Collectives] = Collectives) -> type[Collectives]:
    return type(f"{kind.__name__}Without{line.name.title()}", (kind,), {"left_out": line})


class WithoutGate(Collectives):
    has_gate = False


class RevokesWhenTold(Collectives):
    """Begins with R1 although an agreement has told everybody already."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        was_told = self._line in (None, RegroupLine.FENCE, RegroupLine.CONFIRM) and line is RegroupLine.SHRINK
        return super()._regroup(RegroupLine.REVOKE if was_told else line)


class GoesOnAlone(Collectives):
    """Makes a collective again that somebody has completed."""

    def _go_on(self, line: RegroupLine | None) -> list[Action]:
        if line is None:
            alone = {rank: Progress(self._completed, computed=False) for rank in self._known.progress}
            self._known = ProgressKnown(alone, 1)
        return super()._go_on(line)


def job(make_protocol: type[Collectives], workers: int, deaths: int) -> World:
    # A sum of the survivors lacks what the dead would have given, and is divided by how many it is of.
    make = functools.partial(make_protocol, workers=workers)
    return World(workers=workers, deaths=deaths, buckets=1, make_protocol=make, lossy=True)


@pytest.mark.parametrize("kind", [Collectives, Fails])
@pytest.mark.parametrize(("workers", "deaths"), [(3, 3), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_every_survivor_completes_the_same_collectives_and_none_waits_for_ever(kind, workers, deaths):
    found = explore(Rollback(), job(kind, workers, deaths))

    assert found.violation is None, str(found)
    assert found.states > 100


BROKEN = [
    # What is wrong, workers, deaths, what goes wrong.
    (without(RegroupLine.REVOKE), 3, 1, "deadlock"),
    (without(RegroupLine.HEARD), 3, 1, "agree meets shrink"),
    (without(RegroupLine.FENCE), 4, 2, "revoke meets shrink"),
    (without(RegroupLine.CONFIRM, Fails), 4, 2, "bucket missing"),
    (FailsWhereItWasCalled, 4, 2, "bucket missing"),
    (RevokesWhenTold, 3, 1, "agree meets shrink"),
    (GoesOnAlone, 3, 1, "rubbish is summed"),
    (WithoutGate, 2, 0, "deadlock"),
]


def test_a_collective_that_is_made_again_does_not_need_the_confirmation():
    assert explore(Rollback(), job(without(RegroupLine.CONFIRM), 4, 2)).violation is None


@pytest.mark.parametrize("kind", [Collectives, Fails])
@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_where_a_store_decides_who_is_in_a_generation_no_fence_is_needed(kind, workers):
    world = dataclasses.replace(job(without(RegroupLine.FENCE, kind), workers, 2), atomic_shrink=True)

    assert explore(Rollback(), world).violation is None


@pytest.mark.parametrize(("broken", "workers", "deaths", "kind"), BROKEN)
def test_every_line_is_needed_here_too(broken, workers, deaths, kind):
    if deaths:
        assert explore(Rollback(), job(broken, workers, 0)).violation is None
    found = explore(Rollback(), job(broken, workers, deaths))

    assert found.violation is not None, f"the explorer saw nothing wrong: {found}"
    assert found.violation.startswith(kind), str(found)
