"""What tests of small jobs expect of an exploration: nothing goes wrong, or something of one kind does."""

from __future__ import annotations

import dataclasses
import functools

from holdfast.recovery import Forward, Reinit, Restart, Rollback, Strategy
from holdfast.recovery.messages import Action, Event, HandOver
from model.explorer import Result, World, explore

STRATEGIES = [Rollback(), Forward(), Restart(), Reinit()]
NAMES = ["rollback", "forward", "restart", "reinit"]


def lossy(strategy: Strategy) -> bool:
    """Return whether a step may go without the gradients of a dead worker."""
    return not isinstance(strategy, Rollback | Restart | Reinit)


@functools.cache
def must_hold(strategy: Strategy, world: World) -> int:
    """Expect no violation; return the number of states."""
    found = explore(strategy, world)
    assert found.violation is None, str(found)
    return found.states


def must_break(strategy: Strategy, world: World, kind: str, *, holds_without_deaths: bool = True) -> Result:
    """Expect a violation of this ``kind``, and none as long as nobody dies."""
    if world.deaths and holds_without_deaths:
        must_hold(strategy, dataclasses.replace(world, deaths=0))
    found = explore(strategy, world)
    assert found.violation is not None, f"the explorer saw nothing wrong: {found}"
    assert found.violation.startswith(kind), str(found)
    return found


@dataclasses.dataclass(frozen=True)
class NobodyHandsOver:
    """Forward that forgets the bucket that only some have."""

    def handle(self, event: Event) -> list[Action]:
        """See :meth:`Strategy.handle`."""
        return [order for order in Forward().handle(event) if not isinstance(order, HandOver)]
