"""Uniform agreement among live members, built on a store.

In every act of a generation, each member casts a vote and waits. Once all members have voted that are not known to be
dead, the store creates the decision key. Only the stored decision counts, so it is the same for all members, even if
they knew of different failures.

===========================  =================================================
===========================  =================================================
``g/G/members``              the members of generation G: :func:`~holdfast.membership.acts.encode_members`
``g/G/revoked``              the member that revoked it, if any
``g/G/act/N/...``            votes and decision of the N-th act: :mod:`~holdfast.membership.acts`
``g/G/act/NAME/...``         texts that all members gather
``dead/RANK``                the cause of death; written by the launcher of its node
``join/RANK``                JSON: a newcomer waits to be admitted
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast.errors import InternalError, PeerFailed, VotedOut
from holdfast.membership.acts import RosterVote, decode_members, describe_members, encode_members
from holdfast.membership.store import Store


@dataclass(frozen=True, slots=True, order=True)
class Agreement:
    """Outcome of an agreement: its number in its generation, and its value."""

    act: int = 0
    value: bool = True


class Roster:
    """One member's view of the agreements of a job.

    Methods raise :class:`~holdfast.errors.StoreLost` if the store is lost, and :class:`~holdfast.errors.VotedOut` if
    the other members have continued without this one.

    Args:
        store: The store.
        rank: Rank of this member.
        first_members: Ranks that the job starts with, the same for all; None for a newcomer before :meth:`join`.
    """

    def __init__(self, store: Store, rank: int, first_members: Sequence[int] | None) -> None:
        self.store = store
        self.rank = rank
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.heard = Agreement()
        self.act = 0
        """Number of the last act of this generation that this member took part in, including acts without a
        decision."""
        self._seen = -1
        if first_members is not None:
            store.create("g/0/members", encode_members(first_members))
            beginning = store.wait(lambda: store.get("g/0/members"))
            assert beginning is not None
            self._enter(0, beginning)

    def agree(self, flag: bool) -> bool:
        """Return the AND of all flags; False also if a member is dead. Uniform."""
        _, decided = self._decide(RosterVote(act="agree", flag=flag), self._next_act() + "decision")
        value = bool(json.loads(decided))
        self.heard = Agreement(self.act, value)
        return value

    def shrink(self, *, admits: int = -1, leaves: bool = False) -> None:
        """Enter the next generation: the live members that called, and newcomers if all admit them.

        Members that leave are excluded, unless all would leave: then none is.
        """
        self._next_act()
        vote = RosterVote(act="shrink", admits=admits, leaves=leaves)
        generation, members = self._decide(vote, self._members_key(self.generation + 1))
        self._enter(generation, members, leaves=leaves)
        if self.members[:1] == (self.rank,):
            self._forget(self.generation - 2)

    def revoke(self) -> None:
        """Make :meth:`check` of all members fail."""
        if not self.is_revoked():  # a second revocation tells the members nothing new
            self.store.post_new(f"g/{self.generation}/revoked", str(self.rank))

    def is_revoked(self) -> bool:
        """Return whether a member has revoked this generation."""
        return self.store.get(f"g/{self.generation}/revoked") is not None

    def check(self) -> None:
        """Raise ``PeerFailed`` if a member is known to be dead, or a peer has revoked this generation; very cheap."""
        version = self.store.version  # before the keys: a change that comes in between is looked at next time
        if version == self._seen:
            return
        if revoker := self.store.get(f"g/{self.generation}/revoked"):
            raise PeerFailed(f"worker {revoker} has revoked generation {self.generation}")
        if dead := self.dead():
            raise PeerFailed(f"workers {list(dead)} are dead")
        self._seen = version

    def dead(self) -> tuple[int, ...]:
        """Return the members that are known to be dead."""
        ranks = sorted(int(rank) for rank in self.store.under("dead/"))
        return tuple(rank for rank in ranks if self._has_member(rank))

    def _has_member(self, rank: int) -> bool:
        at = bisect.bisect_left(self.members, rank)
        return at < len(self.members) and self.members[at] == rank

    def newcomers(self, loop: int) -> tuple[int, ...]:
        """Return the workers that wait to be admitted to a training loop."""
        waiting = {int(rank): json.loads(wish) for rank, wish in self.store.under("join/").items()}
        gone = {*self.members, *map(int, self.store.under("dead/"))}  # a member may not have removed its request yet
        return tuple(sorted(rank for rank, wish in waiting.items() if wish["loop"] == loop and rank not in gone))

    def join(self, loop: int, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Wait to be admitted to a training loop, until ``is_late`` (which reads the store); return whether admitted."""
        self.store.put(f"join/{self.rank}", json.dumps({"loop": loop}))

        def is_over() -> bool | None:
            if self._my_generation() is not None or is_late():
                return True
            self._check_reported()
            return None

        self.store.wait(is_over)
        self.store.delete(f"join/{self.rank}")
        if (admission := self._my_generation()) is None:  # looked up again: admitted in the meantime
            return False
        self._enter(*admission)
        return True

    def join_at_once(self) -> None:
        """Join the job, whose members admit newcomers in every shrink: make them shrink, and wait until admitted."""
        self.store.put(f"join/{self.rank}", json.dumps({"loop": 0}))
        revoked = -1
        while (admission := self._my_generation()) is None:
            newest = self._newest_after(revoked)
            self.store.create(f"g/{newest}/revoked", str(self.rank))  # an earlier shrink may have missed the request
            revoked = newest
        self.store.delete(f"join/{self.rank}")
        self._enter(*admission)

    # -- acts

    def gather(self, name: str, text: str | None = "") -> dict[int, str]:
        """Return the texts of the members that are not empty, by rank, once all members have called this.

        A name is used once in a generation, and is no number. ``text`` is None if :meth:`tell` has sent this member's before.

        Raises:
            PeerFailed: if a member is dead, or a peer has revoked this generation.
        """
        prefix = f"g/{self.generation}/act/{name}/"
        if text is not None:
            self.tell(self.generation, name, text)

        def all_texts() -> dict[int, str] | None:
            self.check()
            return gathered(self.store, prefix)

        texts = self.store.wait(all_texts)
        assert texts is not None
        return texts

    def tell(self, generation: int, name: str, text: str) -> None:
        """Send this member's text of a gathering, once, from any thread."""
        self.store.post(f"g/{generation}/act/{name}/{self.rank}", text)

    def _next_act(self) -> str:
        self.act += 1
        return f"g/{self.generation}/act/{self.act}/"

    def _decide(self, vote: RosterVote, key: str) -> tuple[int, str]:
        """Vote, and return the generation after the act and the text of the decision.

        A member that leaves is not waited for: it may get a later generation and the text of its members instead.
        """
        prefix = f"g/{self.generation}/act/{self.act}/"
        self.store.post(f"{prefix}{self.rank}", vote.encode())

        def look() -> str | None:
            if mixed := self.store.get(f"{prefix}mixed"):
                some = json.loads(mixed)
                rest = [rank for rank in self.members if (rank in some) != (self.rank in some)]
                raise InternalError(f"worker {self.rank} is in {vote.act}, workers {rest} are not, in act {prefix}")
            return self.store.get(key) or ("" if self._newer() else None)

        decided = self.store.wait(look)
        if newer := self._newer():
            if vote.leaves or key == self._members_key(newer[0]):
                return newer
            self._stop(*newer)  # the decision may have been removed by now
        assert decided
        return self.generation, decided

    # -- generations

    @staticmethod
    def _members_key(generation: int) -> str:
        return f"g/{generation}/members"

    def _my_generation(self) -> tuple[int, str] | None:
        """Return the newest generation that includes this newcomer, and the text of its members."""
        return max((each for each in self._generations() if self.rank in decode_members(each[1])), default=None)

    def _newest_after(self, generation: int) -> int:
        """Wait for a generation after this one, and return the newest."""

        def newest() -> int | None:
            self._check_reported()
            return max((number for number, _ in self._generations() if number > generation), default=None)

        successor = self.store.wait(newest)
        assert successor is not None
        return successor

    def _check_reported(self) -> None:
        """Raise ``VotedOut`` if this newcomer is reported dead: the members admit it no more, or have gone on without it."""
        if (why := self.store.get(f"dead/{self.rank}")) is not None:
            raise VotedOut(f"worker {self.rank} was reported dead before it joined ({why:.200}), and must stop")

    def _generations(self) -> list[tuple[int, str]]:
        """Return the numbers of the generations that are known, and the texts of their members."""
        texts = {key: members for key, members in self.store.under("g/").items() if key.endswith("/members")}
        return [(int(key.partition("/")[0]), members) for key, members in texts.items()]

    def _forget(self, generation: int) -> None:
        """Remove the keys of a generation that no member is in; of the first one, its members stay."""
        if generation >= 0:
            self.store.delete(f"g/{generation}/" if generation else "g/0/act/")

    def _newer(self) -> tuple[int, str] | None:
        """Return the next generation and the text of its members, or the newest if that was removed; None if there is none."""
        following = self.generation + 1
        if members := self.store.get(self._members_key(following)):
            return following, members
        newest = max(self._generations(), default=None)
        return None if newest is None or newest[0] < following else newest

    def _enter(self, generation: int, members: str, *, leaves: bool = False) -> None:
        """Enter a generation; ``members`` is the text that was decided, which may have been removed from the store since."""
        self.members = decode_members(members)
        self.generation, self.act, self._seen, self.heard = generation, 0, -1, Agreement()
        if not self._has_member(self.rank) and not leaves:
            self._stop(generation, members)

    def _stop(self, generation: int, members: str) -> NoReturn:
        continued = describe_members(decode_members(members))
        raise VotedOut(
            f"worker {self.rank} was voted out: generation {generation} is [{continued}]; it was cut off, or too slow to answer, and must stop"
        )


def gathered(store: Store, prefix: str) -> dict[int, str] | None:
    """Return the texts that the members have gathered under ``prefix``, None while the text of a living one is missing."""
    decision = store.get(f"{prefix}decision")
    return {int(rank): text for rank, text in json.loads(decision).items()} if decision else None
