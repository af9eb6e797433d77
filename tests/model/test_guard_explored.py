"""Every run of small jobs in which somebody's state is found to be corrupt: all go back to the same state, or nobody does."""

import pytest

from holdfast.recovery import Forward, Protocol, Reinit, Restart, Rollback
from holdfast.recovery.messages import CorruptionSeen, LoadCheckpoint
from holdfast.recovery.protocol import ProtocolState
from model.explorer import Lapse, World, explore

STRATEGIES = [Rollback(), Forward(), Restart(), Reinit()]
NAMES = ["rollback", "forward", "restart", "reinit"]


def found(strategy, **world):
    return explore(
        strategy, World(lossy=isinstance(strategy, Forward), **{"workers": 2, "deaths": 1, "flips": 1} | world)
    )


def must_hold(strategy, **world):
    result = found(strategy, **world)
    assert result.violation is None, str(result)


def must_break(kind, strategy, **world):
    result = found(strategy, **world)
    assert result.violation is not None, f"the explorer saw nothing wrong: {result}"
    assert result.violation.startswith(kind), str(result)


class WithoutMeeting(Protocol):
    """Loads as soon as it has heard, without having met the others."""

    def handle(self, event):
        if self.state is ProtocolState.CLOSE and event == CorruptionSeen():
            self._state, self._orders = ProtocolState.ACT, (LoadCheckpoint(),)
            return self._next_order()
        return super().handle(event)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize(
    "world",
    [
        {"flips": 2},
        {"newcomers": 1},
        {"changes": (Restart(),)},
        {"leavers": frozenset({0})},
        {"steps": 4, "rotation": 2, "checkpoint_every": 3},
        {"atomic": False},
        pytest.param({"workers": 3, "deaths": 2, "flips": 2}, marks=pytest.mark.soak),
        pytest.param({"workers": 3, "deaths": 1, "steps": 4, "flips": 2, "rotation": 2}, marks=pytest.mark.soak),
        pytest.param({"newcomers": 2, "leavers": frozenset({0}), "flips": 2}, marks=pytest.mark.soak),
    ],
    ids=lambda world: "-".join(world),
)
def test_all_go_back_together_whoever_dies_meanwhile(strategy, world):
    must_hold(strategy, **world)


def test_with_too_few_workers_what_is_saved_is_right():
    must_hold(Rollback(min_workers=2))


def test_who_goes_back_alone_meets_others_who_do_not():
    """The negative control; as long as nobody dies all hear the same, and all go back."""
    alone = {"make_protocol": WithoutMeeting, "lapses": Lapse.HEALS_ALONE, "workers": 3, "steps": 3}

    must_hold(Rollback(), deaths=0, **alone)
    must_break("internal error: survivors are 2 collectives apart", Rollback(), deaths=1, **alone)


def test_who_loads_without_a_meeting_is_safe_because_loading_is_said_first():
    must_hold(Rollback(), make_protocol=WithoutMeeting, workers=3)


def test_who_has_heard_must_say_so():
    must_break("corrupt state is trained on", Rollback(), deaths=0, lapses=Lapse.NOBODY_SAYS_CORRUPT)


def test_what_was_kept_before_newcomers_came_is_of_no_use():
    must_break("rubbish is summed", Rollback(), newcomers=1, steps=3, lapses=Lapse.KEEPS_SNAPSHOTS)


# -- a message that was altered: nobody's state is wrong, and the step is done again


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize(
    "world",
    [
        {"flips": 2},
        {"newcomers": 1},
        {"changes": (Restart(),)},
        pytest.param({"workers": 3, "deaths": 2, "flips": 2}, marks=pytest.mark.soak),
    ],
    ids=lambda world: "-".join(world),
)
def test_what_was_summed_from_an_altered_message_is_applied_by_nobody_who_has_heard(strategy, world):
    must_hold(strategy, transient=True, **world)


def test_who_has_heard_of_an_altered_message_must_say_so():
    """Under ``forward`` the sums would be taken for good, and under the others the step is done again in any case."""
    must_break("what is corrupt is gone on with", Forward(), transient=True, lapses=Lapse.NOBODY_SAYS_CORRUPT)
    must_hold(Rollback(), transient=True, lapses=Lapse.NOBODY_SAYS_CORRUPT)
