"""Every run of small jobs: the protocol holds, and without any one of its lines it does not."""

import dataclasses
from dataclasses import dataclass

import pytest

from holdfast.errors import InternalError
from holdfast.recovery import Forward, Protocol, Reinit, Restart, Rollback
from holdfast.recovery.messages import (
    Action,
    Admitted,
    AdoptState,
    Agree,
    Agreed,
    ApplyConfig,
    ApplyStep,
    CatchUp,
    ContinueStep,
    Event,
    HandOver,
    LoadCheckpoint,
    MembersChange,
    ProgressKnown,
    SendState,
)
from holdfast.recovery.protocol import ProtocolState
from holdfast.recovery.regroup import RegroupLine
from model.broken import (
    BarrierForGate,
    PublishesAtOnce,
    WithoutConfirming,
    WithoutFence,
    WithoutGate,
    WithoutHearing,
    WithoutRevoke,
)
from model.explorer import Lapse, World, explore
from model.verdicts import NAMES, STRATEGIES, NobodyHandsOver, lossy, must_break, must_hold

ROLLBACK_AND_FORWARD = pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=NAMES[:2])
"""Where the strategy makes no difference, but whether a bucket is handed over, or a step is done again."""

# -- it holds


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize(("workers", "deaths"), [(2, 2), (3, 2), pytest.param(4, 2, marks=pytest.mark.soak)])
def test_nothing_goes_wrong_in_any_run(strategy, workers, deaths):
    states = must_hold(strategy, World(workers=workers, deaths=deaths, lossy=lossy(strategy)))

    assert states > 100


@ROLLBACK_AND_FORWARD
@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_nothing_goes_wrong_when_no_moves_are_joined(strategy, deaths):
    joined = must_hold(strategy, World(deaths=deaths, lossy=lossy(strategy)))
    apart = must_hold(strategy, World(deaths=deaths, lossy=lossy(strategy), atomic=False))

    assert apart > joined


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_nothing_goes_wrong_when_checkpoints_are_rare(strategy):
    must_hold(strategy, World(deaths=1, steps=4, checkpoint_every=3, lossy=lossy(strategy)))


@ROLLBACK_AND_FORWARD
@pytest.mark.parametrize("buckets", [1, 3])
def test_nothing_goes_wrong_whatever_the_number_of_buckets(strategy, buckets):
    must_hold(strategy, World(buckets=buckets, lossy=lossy(strategy)))


@pytest.mark.parametrize("kind", [Rollback, Forward, Restart, Reinit], ids=NAMES)
def test_with_too_few_workers_all_save_the_same_and_stop(kind):
    must_hold(kind(min_workers=3), World(lossy=kind is Forward))


@pytest.mark.parametrize("strategy", [Rollback(), Restart()], ids=["rollback", "restart"])
def test_a_sum_may_spoil_its_input_unless_the_strategy_is_forward(strategy):
    must_hold(strategy, World(deaths=1, in_place=True))


@pytest.mark.parametrize(("snapshots", "checkpoint_every"), [(True, 3), (False, 1)])
def test_an_application_is_built_again_from_snapshots_or_from_what_was_published(snapshots, checkpoint_every):
    world = World(deaths=1, steps=3, checkpoint_every=checkpoint_every, snapshots=snapshots)

    must_hold(Reinit(), world)
    must_hold(Reinit(), dataclasses.replace(world, workers=2, newcomers=1, deaths=2, steps=2))


class RebuildsWithoutCatchingUp(Reinit):
    """Does not finish a step that somebody closed."""

    def handle(self, event: Event) -> list[Action]:
        return [order for order in super().handle(event) if not isinstance(order, CatchUp)]


def test_snapshots_are_of_the_same_step_only_because_who_is_behind_catches_up_first():
    must_break(RebuildsWithoutCatchingUp(), World(), "")


def test_a_step_of_forward_may_lack_the_gradients_of_the_dead():
    must_break(Forward(), World(workers=2, deaths=1, lossy=False), "gradients are missing")


def test_a_world_that_is_too_large_is_refused():
    with pytest.raises(InternalError, match="more than 50 states"):
        explore(Rollback(), World(), limit=50)


# -- sums that are begun while a worker computes, and counted later


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize(
    ("workers", "deaths", "buckets"),
    [
        (2, 1, 2),
        (2, 2, 3),
        pytest.param(3, 1, 3, marks=pytest.mark.soak),
        pytest.param(3, 2, 2, marks=pytest.mark.soak),
    ],
)
def test_sums_may_begin_before_the_step_is_computed(strategy, workers, deaths, buckets):
    world = World(workers=workers, deaths=deaths, buckets=buckets, lossy=lossy(strategy))

    late = must_hold(strategy, world)
    early = must_hold(strategy, dataclasses.replace(world, early=True))

    assert early > late


def test_sums_may_begin_early_when_no_moves_are_joined():
    must_hold(Rollback(), World(workers=2, deaths=1, early=True, atomic=False))


def test_what_was_begun_and_completed_is_counted_before_a_failure_is():
    world = World(deaths=1, buckets=3, early=True, lapses=Lapse.FORGETS_TO_COUNT)

    must_break(Rollback(), world, "internal error: survivors are 2 collectives apart")


def test_the_same_world_gives_the_same_trace():
    world = World(make_protocol=WithoutRevoke)

    assert explore(Rollback(), world) == explore(Rollback(), world)


# -- it holds too when workers come and leave, and the running job is changed


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize(
    ("workers", "newcomers", "deaths"),
    [
        (1, 1, 1),
        (2, 1, 1),
        pytest.param(3, 2, 2, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_newcomers_get_what_the_others_have_or_nobody_goes_on(strategy, workers, newcomers, deaths):
    states = must_hold(strategy, World(workers=workers, newcomers=newcomers, deaths=deaths, lossy=lossy(strategy)))

    assert states > 100


def test_two_newcomers_come_together_or_one_after_the_other():
    must_hold(Rollback(), World(workers=2, newcomers=2, deaths=1))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_a_worker_leaves_in_order(strategy):
    must_hold(strategy, World(deaths=1, leavers=frozenset({0}), lossy=lossy(strategy)))


def test_where_all_would_leave_all_stop():
    must_hold(Rollback(), World(deaths=1, leavers=frozenset({0, 1, 2})))


@pytest.mark.parametrize(
    ("strategy", "other"), [(Rollback(), Forward()), (Forward(), Restart()), (Restart(), Rollback())]
)
def test_changes_count_before_the_same_step_everywhere(strategy, other):
    must_hold(strategy, World(deaths=1, changes=(other,), lossy=lossy(strategy) or lossy(other)))


def test_one_change_may_follow_the_other():
    must_hold(Rollback(), World(deaths=1, changes=(Restart(), Forward()), lossy=True))


@pytest.mark.parametrize("strategy", [Rollback(), Forward(), Reinit()], ids=["rollback", "forward", "reinit"])
def test_all_that_at_once(strategy):
    world = World(workers=2, deaths=1, newcomers=1, leavers=frozenset({0}), changes=(Restart(),), lossy=lossy(strategy))

    must_hold(strategy, world)


def test_coming_leaving_and_changing_do_no_harm_when_no_moves_are_joined():
    world = World(workers=2, deaths=1, atomic=False)

    must_hold(Rollback(), dataclasses.replace(world, newcomers=1))
    must_hold(Rollback(), dataclasses.replace(world, leavers=frozenset({0, 1})))
    must_hold(Rollback(), dataclasses.replace(world, changes=(Restart(),)))


def test_with_newcomers_that_are_too_few_all_stop_with_the_same_state():
    must_hold(Rollback(min_workers=3), World(workers=3, deaths=1, newcomers=1, leavers=frozenset({0})))


def test_newcomers_are_told_of_every_stable_step_after_they_came():
    must_hold(Rollback(), World(workers=2, newcomers=1, all_publish=True))


# -- without one of its lines


class WithoutTold(Protocol):
    """Begins with R1 although an agreement has told everybody already."""

    def handle(self, event: Event) -> list[Action]:
        if self.state in (
            RegroupLine.FENCE,
            RegroupLine.CONFIRM,
            ProtocolState.GATE,
            ProtocolState.LAST_GATE,
        ) and event == Agreed(value=False):
            self._state = ProtocolState.SUM
            return self._recover()
        return super().handle(event)


class LoadsInSilence(Protocol):
    """Does not say that it is loading before it begins to."""

    def _next_order(self) -> list[Action]:
        before = self._completed
        orders = super()._next_order()
        if isinstance(orders[0], LoadCheckpoint):
            self._completed = before
        return orders


class WithoutClosingSum(Protocol):
    """Applies a step right after its last bucket."""

    @property
    def _sums(self) -> int:
        return self._num_buckets

    def _after_bucket(self) -> list[Action]:
        if self._completed % self._sums == self._sums - 1:
            return self._enter(ProtocolState.APPLY, ApplyStep(self.step))
        return super()._after_bucket()

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, ProgressKnown):
            event = ProgressKnown(event.progress, self._sums - 1)
        return super().handle(event)


class Rewinds(Protocol):
    """Goes on where the strategy says, also if it has that sum already."""

    def _next_order(self) -> list[Action]:
        if self._orders and isinstance(self._orders[0], ContinueStep):
            self._completed = self._orders[0].step * self._sums + self._orders[0].next_sum
        return super()._next_order()


@dataclass(frozen=True)
class SummedByAll:
    """Forward that keeps a bucket only if *all* have it, and sums it again otherwise."""

    def handle(self, event: Event) -> list[Action]:
        orders = Forward().handle(event)
        match orders:
            case [HandOver(step=step, bucket=bucket), ContinueStep()]:
                return [ContinueStep(step, bucket)]
            case _:
                return orders


SMALLEST = [
    # What is left out, strategy, workers, deaths, what goes wrong. Who leaves looks dead: that needs no death.
    (WithoutRevoke, Rollback(), 3, 1, "deadlock"),
    (WithoutHearing, Rollback(), 3, 1, "agree meets shrink"),
    (WithoutTold, Rollback(), 3, 1, "agree meets shrink"),
    (WithoutFence, Rollback(), 4, 2, "revoke meets shrink"),
    (WithoutConfirming, Rollback(), 4, 2, "internal error: survivors are 2 collectives apart"),
    (WithoutConfirming, Forward(), 4, 2, "rubbish is summed"),
    (LoadsInSilence, Restart(), 4, 2, "internal error: survivors are 2 collectives apart"),
    (WithoutClosingSum, Rollback(), 3, 1, "bucket missing"),
    (WithoutClosingSum, Forward(), 3, 1, "bucket missing"),
    (WithoutClosingSum, Restart(), 3, 1, "bucket missing"),
    (WithoutGate, Rollback(), 2, 0, "deadlock"),
    (BarrierForGate, Rollback(), 2, 0, "deadlock"),
    (PublishesAtOnce, Rollback(), 2, 1, "published state is not in the history"),
    (Rewinds, SummedByAll(), 3, 1, "rubbish is summed"),
    (Protocol, NobodyHandsOver(), 3, 1, "rubbish is summed"),
]


@pytest.mark.parametrize(("broken", "strategy", "workers", "deaths", "kind"), SMALLEST)
def test_every_line_of_the_protocol_is_needed(broken, strategy, workers, deaths, kind):
    world = World(workers=workers, deaths=deaths, lossy=lossy(strategy), make_protocol=broken)

    must_break(strategy, world, kind)


ONE_OF_EACH_KIND = {case[-1]: case for case in reversed(SMALLEST) if case[2] < 4}


@pytest.mark.parametrize(("broken", "strategy", "workers", "deaths", "kind"), ONE_OF_EACH_KIND.values())
def test_it_is_found_as_well_when_no_moves_are_joined(broken, strategy, workers, deaths, kind):
    world = World(workers=workers, deaths=deaths, lossy=lossy(strategy), make_protocol=broken, atomic=False)

    must_break(strategy, world, kind)


class PassesFence(Protocol):
    """Needs no fence, neither after a shrink nor as a newcomer: a store decides a generation for all members at once."""

    def _regroup(self, line: RegroupLine) -> list[Action]:
        return super()._regroup(RegroupLine.SHARE if line is RegroupLine.FENCE else line)


STORED = World(make_protocol=PassesFence, atomic_shrink=True)


@ROLLBACK_AND_FORWARD
@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_where_a_store_decides_who_is_in_a_generation_no_fence_is_needed(strategy, workers):
    must_hold(strategy, dataclasses.replace(STORED, workers=workers, lossy=lossy(strategy)))


def test_newcomers_need_no_fence_there_either_and_it_holds_when_no_moves_are_joined():
    world = dataclasses.replace(STORED, workers=2, deaths=1)

    must_hold(Rollback(), dataclasses.replace(world, newcomers=1))
    must_hold(Rollback(), dataclasses.replace(world, atomic=False))


def test_one_who_leaves_needs_no_fence_there():
    must_hold(Rollback(), dataclasses.replace(STORED, deaths=1, leavers=frozenset({1})))


def test_restart_alone_does_not_need_the_confirmation_because_loading_is_said_first():
    must_hold(Restart(), World(workers=4, deaths=2, make_protocol=WithoutConfirming))


def test_forward_and_restart_may_publish_at_once_because_what_one_closed_all_hold():
    must_hold(Forward(), World(deaths=1, make_protocol=PublishesAtOnce, lossy=True))
    must_hold(Restart(), World(deaths=1, make_protocol=PublishesAtOnce))


# -- without one of the lines by which workers come and leave


class MeetsInSilence(Protocol):
    """Shrinks at once when members change: does not wait for those who have not heard of it."""

    def handle(self, event: Event) -> list[Action]:
        if self.state is ProtocolState.COMPUTE and event == MembersChange():
            return self._regroup(RegroupLine.SHRINK)
        return super().handle(event)


class WithoutAgreeingOn(Protocol):
    """What was given counts at once, whoever else has it."""

    def _next_order(self) -> list[Action]:
        self._orders = tuple(order for order in self._orders if order != Agree(flag=True))
        return super()._next_order()


class WithoutInstalling(Protocol):
    """A newcomer goes on without what it was given."""

    def _next_order(self) -> list[Action]:
        match self._orders:
            case [AdoptState(step=step), *rest]:
                self._completed, self._orders = step * self._sums, tuple(rest)
        return super()._next_order()


class InstallsBeforeAgreeing(Protocol):
    """What was given counts at once, but nobody goes on before all have agreed."""

    def _next_order(self) -> list[Action]:
        match self._orders:
            case [Agree(), (AdoptState() | ApplyConfig()) as counts, *rest]:
                self._orders = (counts, Agree(flag=True), *rest)
        return super()._next_order()


class CountsNewcomers(Protocol):
    """Lets the strategy decide with those in view who have no state yet."""

    def _decide(self) -> list[Action]:
        self._orders = tuple(self._strategy.handle(self._known))
        self._state = ProtocolState.ACT
        return self._next_order()


class SaysThatItIsAtTheStart(Protocol):
    """A newcomer does not say that it has no state."""

    def handle(self, event: Event) -> list[Action]:
        orders = super().handle(event)
        if isinstance(event, Admitted):
            self._completed = 0
        return orders


class EntersWithoutFence(Protocol):
    """A newcomer does not wait until everybody has left the shrink."""

    def handle(self, event: Event) -> list[Action]:
        orders = super().handle(event)
        return self._regroup(RegroupLine.SHARE) if isinstance(event, Admitted) else orders


class WelcomesOnce(Protocol):
    """Takes newcomers for installed when they have been welcomed, also if that was interrupted."""

    def _next_order(self) -> list[Action]:
        if self._orders and isinstance(self._orders[0], SendState) and self._completed < 0:
            step = self._orders[0].step
            orders = super()._next_order()
            self._completed = step * self._sums
            return orders
        return super()._next_order()


COMING = [
    # What is wrong, strategy, workers, newcomers, deaths, what goes wrong.
    (MeetsInSilence, Rollback(), 3, 1, 1, "agree meets shrink"),
    (WithoutAgreeingOn, Rollback(), 2, 1, 1, "wrong state is given"),
    (WithoutInstalling, Rollback(), 2, 1, 0, "wrong step"),
    (CountsNewcomers, Rollback(), 2, 1, 0, "internal error: survivors are 5 collectives apart"),
    (SaysThatItIsAtTheStart, Rollback(), 2, 1, 0, "internal error: survivors are 3 collectives apart"),
    (EntersWithoutFence, Rollback(), 2, 1, 0, "deadlock"),
    (WelcomesOnce, Rollback(), 2, 1, 1, "wrong step"),
]


@pytest.mark.parametrize(("broken", "strategy", "workers", "newcomers", "deaths", "kind"), COMING)
def test_every_line_by_which_newcomers_come_is_needed(broken, strategy, workers, newcomers, deaths, kind):
    world = World(workers=workers, newcomers=newcomers, deaths=deaths, make_protocol=broken)

    must_break(strategy, world, kind)


def test_all_must_agree_that_they_have_a_change_before_anybody_makes_it():
    world = World(deaths=1, make_protocol=WithoutAgreeingOn)

    must_break(Rollback(), dataclasses.replace(world, changes=(Restart(),)), "rubbish is summed")
    must_hold(Rollback(), dataclasses.replace(world, changes=(Forward(),), lossy=True))  # both take the step back


def test_a_newcomer_may_install_before_the_agreement_but_a_change_may_not_be_made_then():
    world = World(deaths=1, make_protocol=InstallsBeforeAgreeing)

    must_hold(Rollback(), dataclasses.replace(world, newcomers=1))
    must_break(Rollback(), dataclasses.replace(world, changes=(Restart(),)), "rubbish is summed")


# -- with an engine that breaks its contract


def test_newcomers_are_not_admitted_where_somebody_has_not_heard_of_them():
    world = World(deaths=1, newcomers=1, lapses=Lapse.ADMITS_EARLY)

    must_break(Rollback(), world, "internal error: newcomers [3] were admitted by workers that were not all between")


@pytest.mark.parametrize(("leavers", "deaths"), [({0, 1}, 0), ({0}, 1)], ids=["all are told", "the other dies"])
def test_nobody_leaves_where_nobody_stays(leavers, deaths):
    world = World(workers=2, deaths=deaths, leavers=frozenset(leavers))

    must_hold(Rollback(), world)
    must_break(Rollback(), dataclasses.replace(world, lapses=Lapse.ALL_LEAVE), "nobody stays")


def test_who_has_heard_of_a_change_says_so_in_recovery():
    must_break(Rollback(), World(deaths=1, changes=(Restart(),), lapses=Lapse.KEEPS_ASK), "rubbish is summed")


def test_a_change_does_not_count_before_all_have_agreed_that_they_have_it():
    must_break(Rollback(), World(deaths=1, changes=(Restart(),), lapses=Lapse.TAKES_AT_ONCE), "rubbish is summed")


@ROLLBACK_AND_FORWARD
def test_a_broadcast_in_the_sequence_drives_workers_apart(strategy):
    world = World(deaths=1, rooted=frozenset({1}), lossy=lossy(strategy))

    must_break(strategy, world, "internal error: survivors are 2 collectives apart")


def test_with_a_broadcast_as_first_bucket_a_step_is_published_that_is_not_stable():
    must_break(Rollback(), World(workers=2, deaths=1, rooted=frozenset({0})), "published state is not in the history")


def test_an_agreement_that_is_not_uniform_breaks_everything():
    must_break(Rollback(), World(deaths=1, uniform=False), "agree meets shrink")


def test_forward_needs_sums_that_leave_their_input_whole():
    must_break(Forward(), World(workers=2, deaths=1, in_place=True, lossy=True), "rubbish is summed")


# -- everybody is told what is stable


@ROLLBACK_AND_FORWARD
def test_every_survivor_is_told_of_every_stable_step(strategy):
    must_hold(strategy, World(all_publish=True, lossy=lossy(strategy)))
