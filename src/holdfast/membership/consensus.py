r"""Consensus of the hubs of a job: which of them leads, and in which order operations are executed. Pure: no sockets.

One hub leads in each epoch. It sends every operation to the others, and executes it once a quorum has it. Another hub
takes over in a later epoch, if a quorum votes for it. A hub that has voted follows no earlier epoch any more, and votes
only for a hub that has all that it has; so the new leader has every operation that was executed, and the old one, which
may only have been stopped or cut off, executes none. A leader first gives its whole state to a quorum; the log before
it is not needed.

A quorum is a majority of the voters, or half of them with the leader that chose them (``tie``). Nothing is on disk: a
hub that restarts has another name, and no vote before the others have made it a voter. While voters change, a quorum of
the old ones and one of the new ones are needed (joint consensus).

Messages of a leader or candidate, and the answers:

===========  ====================================================================
``vote``     the epoch to lead, with ``last`` and ``dry`` (only asks) -> ``granted``
``state``    the whole state in an epoch                              -> ``ack``
``op``       the next operation                                       -> ``ack``
``beat``     shows that the leader is alive, and when                 -> ``ack``
\            an epoch is over                                        -> ``higher``
===========  ====================================================================

Source:
    D. Ongaro and J. Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014 (elections, joint
    consensus); B. Liskov and J. Cowling, "Viewstamped Replication Revisited", 2012 (no disk; state in a new view).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.membership.hub_state import Applied, HubState, Operation

PeerMessage = dict[str, Any]
Done = Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Voters:
    """The hubs that vote, and the one that decides a tie."""

    members: tuple[str, ...]
    tie: str

    def is_quorum(self, hubs: Iterable[str]) -> bool:
        """Return whether any other quorum of these voters has a member in common with ``hubs``."""
        present = set(hubs).intersection(self.members)
        return 2 * (2 * len(present) + (self.tie in present)) > 2 * len(self.members) + (self.tie in self.members)

    def dump(self) -> list[Any]:
        """Return them as JSON."""
        return [list(self.members), self.tie]

    @classmethod
    def load(cls, dumped: Any) -> Voters:
        """Return what :meth:`dump` returned."""
        return cls(tuple(dumped[0]), dumped[1])


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operation that the leader has sent, but not executed yet."""

    index: int
    operation: Operation
    done: Done | None


class Consensus:
    """One hub's part.

    Args:
        me: Name of this hub, different after each restart.
        send: Sends a message to another hub; it may be lost, but messages to one hub are not reordered.
        executed: Called on the leader after each operation of a client.
        clock: Monotonic time in seconds.
        fresh_s: A leader that was heard within this time is alive: no other hub is elected, and it serves clients.
    """

    def __init__(
        self,
        me: str,
        send: Callable[[str, PeerMessage], None],
        executed: Callable[[Operation, Applied], None],
        clock: Callable[[], float],
        fresh_s: float,
    ) -> None:
        self.me = me
        self._send, self._executed, self._clock, self._fresh_s = send, executed, clock, fresh_s
        self.state = HubState()
        self.epoch = 0
        """The highest epoch in which this hub has voted, or followed a leader."""
        self.leader = ""
        """The hub that may lead in this epoch, as far as this one is concerned."""
        self.voters = Voters((), "")
        self.previous: Voters | None = None
        """The voters before a change that is not complete."""
        self._adopted = self._index = 0
        self._pending: deque[_Entry] = deque()
        self._acked: dict[str, int] = {}
        self._following: set[str] = set()
        self._contact_s: dict[str, float] = {}
        self._heard_s = -math.inf
        self._campaign: tuple[int, bool] | None = None
        self._granted: set[str] = set()
        self._seen = 0
        self.leads = False
        """Whether this hub was elected, and has not followed another since."""
        self.serves = False
        """Whether it leads, and a quorum has its state: only then may it answer clients."""

    @property
    def is_new(self) -> bool:
        """Whether this hub has no state yet, and so no vote."""
        return not self._adopted

    @property
    def is_voter(self) -> bool:
        """Whether this hub may be elected, as far as it knows."""
        return self.me in self._all_voters()

    @property
    def may_change(self) -> bool:
        """Whether the voters can be changed now."""
        return self.serves and self.previous is None

    @property
    def last(self) -> tuple[int, int]:
        """Position of the state: of two hubs, the one with the larger position has all that the other one has."""
        return self._adopted, self._index

    def has_contact(self) -> bool:
        """Return whether a quorum has answered this leader just now: no other hub can have taken over before that."""
        return self.serves and self._is_quorum({self.me, *self.in_touch(self._fresh_s)})

    def in_touch(self, within_s: float) -> list[str]:
        """Return the hubs that have this leader's state, and have answered what was sent within this time."""
        since_s = self._clock() - within_s
        return [hub for hub, contact_s in self._contact_s.items() if contact_s >= since_s]

    def is_following(self, hub: str) -> bool:
        """Return whether this leader has given a hub its state, over a connection that has not ended."""
        return hub in self._following

    # -- leading

    def found(self, members: Sequence[str]) -> None:
        """Lead the first epoch; none of the members may have taken part in another."""
        self.epoch, self.leader = 1, self.me
        self.voters = Voters(tuple(members), self.me)
        self._lead()

    def stand(self) -> None:
        """Ask the voters to make this hub the leader; first only whether they would, which disturbs no leader."""
        self._canvass(max(self.epoch, self._seen) + 1, dry=True)

    def _canvass(self, epoch: int, *, dry: bool) -> None:
        self._campaign, self._granted = (epoch, dry), {self.me}
        for hub in sorted(self._all_voters() - {self.me}):
            self._send(hub, {"vote": epoch, "last": self.last, "dry": dry})
        self._count_votes()

    def _count_votes(self) -> None:
        if self._campaign is None or not self._is_quorum(self._granted):
            return
        epoch, dry = self._campaign
        if dry:
            self.epoch, self.leader = epoch, self.me
            self._canvass(epoch, dry=False)
        else:
            self._lead()

    def _lead(self) -> None:
        self._campaign, self.leads = None, True
        self._adopted = self.epoch
        self._acked, self._following, self._contact_s = {}, set(), {}
        self._advance()

    def give_state(self, hub: str) -> None:
        """Send a hub the whole state; from then on it receives each operation."""
        self._following.add(hub)
        voters, previous = self.voters.dump(), None if self.previous is None else self.previous.dump()
        # With what is pending: the hub may have acknowledged it already, and must not lose it.
        then = [entry.operation for entry in self._pending]
        self._send(
            hub,
            {
                "state": self.state.dump(),
                "then": then,
                "epoch": self.epoch,
                "index": self._index,
                "voters": voters,
                "previous": previous,
            },
        )

    def lose(self, hub: str) -> None:
        """Note that messages to a hub were lost: it needs the whole state again."""
        self._following.discard(hub)

    def beat(self) -> None:
        """Show all followers that this leader is alive."""
        now_s = self._clock()
        for hub in sorted(self._following):
            self._send(hub, {"beat": now_s, "epoch": self.epoch})

    def append(self, operation: Operation, done: Done | None = None) -> None:
        """Execute an operation once a quorum has it; ``done`` is called with its outcome, unless another hub takes over."""
        assert self.serves
        self._index += 1
        self._note_voters(operation)
        self._pending.append(_Entry(self._index, operation, done))
        for hub in sorted(self._following):
            self._send(hub, {"op": operation, "epoch": self.epoch, "index": self._index})
        self._advance()

    def change_voters(self, members: Sequence[str]) -> None:
        """Change the voters, with this hub as the one that decides a tie if it is among them."""
        tie = self.me if self.me in members else members[0]
        self.append({"op": "voters", "voters": Voters(tuple(members), tie).dump()})

    def _note_voters(self, operation: Operation) -> None:
        if operation["op"] == "voters":
            self.previous, self.voters = self.voters, Voters.load(operation["voters"])
        elif operation["op"] == "settled":
            self.previous = None

    def _advance(self) -> None:
        """Execute what a quorum has."""
        if self.leads and not self.serves and self._is_quorum({self.me, *self._acked}):
            self.serves = True
            if self.previous is not None:
                self.append({"op": "settled"})
        while self.serves and self._pending:
            entry = self._pending[0]
            if not self._is_quorum({self.me, *(hub for hub, index in self._acked.items() if index >= entry.index)}):
                return
            self._pending.popleft()
            self._execute(entry)

    def _execute(self, entry: _Entry) -> None:
        kind = entry.operation["op"]
        if kind == "voters":
            self.append({"op": "settled"})
        elif kind == "settled":
            if not self.is_voter:
                self._step_down()
        else:
            applied = self.state.apply(entry.operation)
            self._executed(entry.operation, applied)
            if entry.done is not None:
                entry.done(applied.done)

    def _is_quorum(self, hubs: set[str]) -> bool:
        return self.voters.is_quorum(hubs) and (self.previous is None or self.previous.is_quorum(hubs))

    def _all_voters(self) -> set[str]:
        return {*self.voters.members, *(() if self.previous is None else self.previous.members)}

    def _step_down(self) -> None:
        """Lead no longer. What was sent belongs to the state, as it does on the hubs that have received it."""
        self.leads = self.serves = False
        self._campaign = None
        while self._pending:
            self._apply(self._pending.popleft().operation)

    def _apply(self, operation: Operation) -> None:
        if operation["op"] not in ("voters", "settled"):
            self.state.apply(operation)

    def take_answer(self, hub: str, answer: PeerMessage) -> None:
        """Take the answer of another hub."""
        if "higher" in answer:
            self._seen = max(self._seen, answer["higher"])
            if answer["higher"] > self.epoch and self.leads:
                self._step_down()
        elif "granted" in answer:
            self._seen = max(self._seen, answer["epoch"])
            if answer["granted"] and self._campaign == (answer["vote"], answer["dry"]):
                self._granted.add(hub)
                self._count_votes()
        elif self.leads and answer["epoch"] == self.epoch:
            self._acked[hub] = max(self._acked.get(hub, 0), answer["ack"])
            if answer["beat"] is not None:  # answered in this epoch, so it has the state
                self._contact_s[hub] = max(self._contact_s.get(hub, -math.inf), answer["beat"])
            self._advance()

    # -- following

    def receive(self, hub: str, message: PeerMessage) -> PeerMessage:
        """Return the answer to a message of another hub."""
        if "vote" in message:
            return self._vote(hub, message)
        if "state" in message:
            return self._adopt(hub, message)
        if (message["epoch"], hub) != (self.epoch, self.leader) or self._adopted != self.epoch or self.leads:
            return {"higher": self.epoch}
        self._heard_s = self._clock()
        if "op" in message:
            if message["index"] != self._index + 1:
                raise ValueError(f"operation {message['index']} follows {self._index}")
            self._index += 1
            self._note_voters(message["op"])
            self._apply(message["op"])
        return {"ack": self._index, "epoch": self.epoch, "beat": message.get("beat")}

    def _vote(self, hub: str, message: PeerMessage) -> PeerMessage:
        epoch, dry = message["vote"], message["dry"]
        granted = epoch > self.epoch and tuple(message["last"]) >= self.last
        granted = granted and not self.is_new and not self.has_contact() and not self.hears_leader()
        if granted and not dry:
            self._step_down()
            self.epoch, self.leader = epoch, hub
        return {"granted": granted, "vote": epoch, "dry": dry, "epoch": self.epoch}

    def hears_leader(self) -> bool:
        """Return whether this hub has just heard of a leader that it follows."""
        return self._clock() - self._heard_s <= self._fresh_s

    def forget_leader(self, hub: str) -> None:
        """Note that the connection of a hub has ended: if it is the leader, it is lost."""
        if hub == self.leader:
            self._heard_s = -math.inf

    def _adopt(self, hub: str, message: PeerMessage) -> PeerMessage:
        epoch = message["epoch"]
        if epoch < self.epoch or (epoch == self.epoch and self.leader not in ("", hub)):
            return {"higher": self.epoch}
        if (epoch, message["index"]) < self.last:  # of an earlier connection: this hub has acknowledged more
            return {"ack": self._index, "epoch": epoch, "beat": None}
        self._step_down()
        self.epoch = self._adopted = epoch
        self.leader, self._index = hub, message["index"]
        self.voters = Voters.load(message["voters"])
        self.previous = None if message["previous"] is None else Voters.load(message["previous"])
        self.state = HubState.load(message["state"])
        for operation in message["then"]:
            self._apply(operation)
        self._heard_s = self._clock()
        return {"ack": self._index, "epoch": epoch, "beat": None}
