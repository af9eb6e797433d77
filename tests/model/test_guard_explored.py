"""Every run of small jobs in which somebody's state is found to be corrupt: all go back to the same state, or nobody does."""

import dataclasses

import pytest

from holdfast.recovery import Forward, Protocol, Restart, Rollback
from holdfast.recovery.messages import CorruptionSeen, LoadCheckpoint
from holdfast.recovery.protocol import ProtocolState
from model.explorer import Lapse, World
from model.verdicts import NAMES, STRATEGIES, lossy, must_break, must_hold

SMALL = World(workers=2, deaths=1, flips=1)


def cases(*worlds):
    """Each strategy in the first of ``worlds``, and two in the others, as what happens in these is the same under all."""
    made = []
    for fields in worlds:
        for strategy, name in list(zip(STRATEGIES, NAMES, strict=True))[: 4 if fields is worlds[0] else 2]:
            world = dataclasses.replace(SMALL, lossy=lossy(strategy), **fields)
            marks = pytest.mark.soak if world.workers > 2 or world.newcomers > 1 else ()
            made.append(pytest.param(strategy, world, id=f"{'-'.join(fields)}-{name}", marks=marks))
    return made


class WithoutMeeting(Protocol):
    """Loads as soon as it has heard, without having met the others."""

    def handle(self, event):
        if self.state is ProtocolState.CLOSE and event == CorruptionSeen():
            self._state, self._orders = ProtocolState.ACT, (LoadCheckpoint(),)
            return self._next_order()
        return super().handle(event)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *cases(
            {"flips": 2},
            {"newcomers": 1},
            {"changes": (Restart(),)},
            {"leavers": frozenset({0})},
            {"steps": 4, "rotation": 2, "checkpoint_every": 3},
            {"atomic": False},
            {"workers": 3, "steps": 4, "flips": 2, "rotation": 2},
            {"newcomers": 2, "leavers": frozenset({0}), "flips": 2},
        ),
        *cases({"workers": 3, "deaths": 2, "flips": 2}),
    ],
)
def test_all_go_back_together_whoever_dies_meanwhile(strategy, world):
    must_hold(strategy, world)


def test_with_too_few_workers_what_is_saved_is_right():
    must_hold(Rollback(min_workers=2), SMALL)


def test_who_goes_back_alone_meets_others_who_do_not():
    """The negative control; as long as nobody dies all hear the same, and all go back."""
    alone = dataclasses.replace(SMALL, make_protocol=WithoutMeeting, lapses=Lapse.HEALS_ALONE, workers=3, steps=3)

    must_break(Rollback(), alone, "internal error: survivors are 2 collectives apart")


def test_who_loads_without_a_meeting_is_safe_because_loading_is_said_first():
    must_hold(Rollback(), dataclasses.replace(SMALL, make_protocol=WithoutMeeting, workers=3))


def test_who_has_heard_must_say_so():
    world = dataclasses.replace(SMALL, deaths=0, lapses=Lapse.NOBODY_SAYS_CORRUPT)

    must_break(Rollback(), world, "corrupt state is trained on")


def test_what_was_kept_before_newcomers_came_is_of_no_use():
    world = dataclasses.replace(SMALL, newcomers=1, steps=3, lapses=Lapse.KEEPS_SNAPSHOTS)

    must_break(Rollback(), world, "rubbish is summed", holds_without_deaths=False)


# -- a message that was altered: nobody's state is wrong, and the step is done again


@pytest.mark.parametrize(
    ("strategy", "world"),
    cases({"flips": 2}, {"newcomers": 1}, {"changes": (Restart(),)}, {"workers": 3, "deaths": 2, "flips": 2}),
)
def test_what_was_summed_from_an_altered_message_is_applied_by_nobody_who_has_heard(strategy, world):
    must_hold(strategy, dataclasses.replace(world, transient=True))


def test_who_has_heard_of_an_altered_message_must_say_so():
    """Under ``forward`` the sums would be taken for good, and under the others the step is done again in any case."""
    world = dataclasses.replace(SMALL, transient=True, lapses=Lapse.NOBODY_SAYS_CORRUPT)
    lossy_world = dataclasses.replace(world, lossy=True)

    must_break(Forward(), lossy_world, "what is corrupt is gone on with", holds_without_deaths=False)
    must_hold(Rollback(), world)
