"""Random scenarios for rosters: members agree, shrink, die, leave and join, over any store; and their invariants."""

import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field

from holdfast.errors import VotedOut
from holdfast.membership.acts import NodeVotes, Tally, vote_key
from holdfast.membership.roster import Roster
from holdfast.membership.store import Store


class Killed(BaseException):
    """The member is dead; no code of the product catches this."""


@dataclass
class Part:
    """The script of one member.

    Args:
        rank: Its rank.
        dies_at: The write in which it dies, counting from 0; None never.
        dies_after: It dies after that write, not before it.
        leaves_in: The first generation that it wants to leave; None never.
        refuses: The (generation, act) in which it votes no.
    """

    rank: int
    dies_at: int | None = None
    dies_after: bool = False
    leaves_in: int | None = None
    refuses: frozenset = frozenset()


@dataclass
class Seen:
    """The observations of the members."""

    agreed: dict = field(default_factory=lambda: defaultdict(dict))
    members: dict = field(default_factory=lambda: defaultdict(dict))
    ends: dict = field(default_factory=dict)


class Mortal:
    """A store whose owner dies at one of its writes."""

    def __init__(self, store, part):
        self._store, self._part, self._writes = store, part, 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, value, *, leased=False):
        return self._write(lambda: self._store.put(key, value, leased=leased))

    def create(self, key, value):
        return self._write(lambda: self._store.create(key, value))

    def post(self, key, value):
        return self._write(lambda: self._store.post(key, value))

    def post_new(self, key, value):
        return self._write(lambda: self._store.post_new(key, value))

    def delete(self, key):
        return self._write(lambda: self._store.delete(key))

    def _write(self, do):
        dies, self._writes = self._writes == self._part.dies_at, self._writes + 1
        if dies and not self._part.dies_after:
            raise Killed
        done = do()
        if dies:
            raise Killed
        return done


def draw_parts(seed, world=4, newcomers=2):
    """Draw the scripts of the members; the highest rank of the initial world survives."""
    rng = random.Random(seed)
    parts = []
    for rank in range(world + newcomers):
        fate = rng.random() if rank != world - 1 else 1.0
        parts.append(
            Part(
                rank,
                dies_at=rng.randrange(12) if fate < 0.5 else None,
                dies_after=rng.random() < 0.5,
                leaves_in=rng.randrange(1, 4) if 0.5 <= fate < 0.65 else None,
                refuses=frozenset((generation, rng.randrange(1, 3)) for generation in range(3) if rng.random() < 0.25),
            )
        )
    return parts


def play(part, store, world, seen):
    """Play one member from start to end; return how it ended."""
    store = Mortal(store, part)
    try:
        end = _act(part, store, world, seen)
    except Killed:
        end = "killed"
    except VotedOut:
        end = "voted out"
    seen.ends[part.rank] = end
    return end


def _act(part, store, world, seen):
    is_newcomer = part.rank not in world
    roster = Roster(store, part.rank, None if is_newcomer else world)
    if is_newcomer and not roster.join(0, lambda: store.get("loop") is not None):
        return "late"
    agreements = 0
    while agreements < 3:
        at = roster.generation, roster.act + 1
        seen.members[roster.generation][part.rank] = roster.members
        agreed = roster.agree(at not in part.refuses and not roster.newcomers(0))
        seen.agreed[at][part.rank] = agreed
        agreements = agreements + 1 if agreed else 0
        if not agreed:
            leaves = part.leaves_in is not None and roster.generation >= part.leaves_in
            roster.shrink(admits=0, leaves=leaves)
            if leaves and part.rank not in roster.members:
                return "left"
    store.put("loop", "1")
    return "finished"


def check(seen, parts, world, suspects=()):
    """Whichever members died when: the survivors observed the same, and no surviving member is lost."""
    for what in (seen.agreed, seen.members):
        for at, said in what.items():
            assert len(set(said.values())) == 1, f"{at}: {said}"
    for generation, said in seen.members.items():
        assert said.keys() <= set(next(iter(said.values()))), f"generation {generation}: {said}"
    assert seen.ends.keys() == {part.rank for part in parts}
    for part in parts:
        allowed = {"finished"} if part.rank in world else {"finished", "late"}
        if part.dies_at is not None:
            allowed.add("killed")
        if part.leaves_in is not None:
            allowed.add("left")
        if part.rank in suspects:
            allowed |= {"voted out", "late"}
        assert seen.ends[part.rank] in allowed, f"{part}: {seen.ends}"


class Explored:
    """A store in this process that shows each member every change in order, with a random delay.

    One thread runs at a time; whenever it reaches the store, the generator chooses the next one. A seed determines the
    run.

    Args:
        seed: Seed of the generator.
        patience: Maximum number of turns.
        counts: Whether the store counts votes itself; if not, each client does when it sees them, as with etcd.
        slow: Name of a seat that mostly waits while another one can run.
    """

    def __init__(self, seed, patience=2000, counts=False, slow=None):
        self.slow = slow
        self.tally = Tally() if counts else None
        self.rng = random.Random(seed)
        self.log, self.items, self.created = [], {}, {}
        self.patience = patience
        self.broken = ""
        self._seats, self._turn = {}, None
        self._lock = threading.Condition()

    def seat(self, name, relay=None):
        self._seats[name] = Seat(self, name, relay)
        return self._seats[name]

    def relay(self, name, ranks):
        self._seats[name] = RelaySeat(self, name, ranks)
        return self._seats[name]

    def write(self, key, value):
        decided = [] if self.tally is None else self.tally.note(key, value)
        if value is None:
            del self.items[key]
        else:
            self.items[key] = value
        if self.tally is None or vote_key(key) is None:
            self.log.append((key, value))
            self.created.setdefault(key, len(self.log))
            if value is None:
                del self.created[key]
        for name, text, _ in decided:
            if name not in self.items:
                self.write(name, text)

    def run(self, acts):
        """Run functions, one for each name, each in its own thread, to completion."""
        errors = []

        def act(name):
            self.yield_(name, begins=True)
            try:
                acts[name]()
            except (
                BaseException
            ) as error:  # whatever it is, the other threads must continue, and the test must report it
                errors.append(error)
            self._leave(name)

        threads = [threading.Thread(target=act, args=[name]) for name in acts]
        for thread in threads:
            thread.start()
        with self._lock:
            self._lock.wait_for(lambda: all(seat.is_ready for seat in self._seats.values()))
            self._choose()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]
        assert not self.broken, self.broken

    def yield_(self, name, begins=False):
        with self._lock:
            if begins:
                self._seats[name].is_ready = True
                self._lock.notify_all()
            else:
                self._choose()
            self._lock.wait_for(lambda: self._turn == name or self.broken)
        if self.broken:
            raise AssertionError(self.broken)

    def _leave(self, name):
        with self._lock:
            del self._seats[name]
            self._choose()

    def _choose(self):
        """Resume a thread that can run: it has changes to see, or is not waiting."""
        able = [name for name, seat in self._seats.items() if not seat.waits or seat.has_news]
        self.patience -= 1
        if self._seats and (not able or self.patience < 0):
            self.broken = (
                self.broken or f"no thread can run, or none comes to an end: {list(self._seats)}, {self.items}"
            )
        if self.slow in able and len(able) > 1 and self.rng.random() < 0.98:
            able.remove(self.slow)
        self._turn = self.rng.choice(able) if able else None
        self._lock.notify_all()


class Seat(Store):
    """The explored store as one member sees it."""

    own_address = ""

    def __init__(self, world, name, relay=None):
        super().__init__()
        self.world, self.name, self.relay = world, name, relay
        self.known, self.waits, self.is_ready = 0, False, False
        self.tally, self.votes, self.decisions = Tally() if world.tally is None else None, {}, []

    @property
    def has_news(self):
        return self.known < len(self.world.log)

    def close(self):
        pass

    def put(self, key, value, *, leased=False):
        if self.relay is not None and vote_key(key) is not None:
            self.world.yield_(self.name)
            self.relay.inbox.append((vote_key(key), value))
        else:
            self._write([(key, value)])

    def create(self, key, value):
        self.world.yield_(self.name)
        is_first = key not in self.world.items
        self._write([(key, value)] if is_first else [], yields=False)
        return is_first

    def delete(self, key):
        self.world.yield_(self.name)
        gone = [name for name in self.world.items if name == key or (key.endswith("/") and name.startswith(key))]
        self._write([(name, None) for name in gone], yields=False)

    def wait(self, ready, timeout_s=None):
        self._decide()
        while (found := ready()) is None:
            self.waits = True
            self.world.yield_(self.name)
            self.waits = False
            if self.known < len(self.world.log):
                self._learn(self.world.rng.randint(self.known + 1, len(self.world.log)))
            self._decide()
        return found

    def _decide(self):
        """Create the decisions that follow from the votes, some time after this client has counted them."""
        while self.decisions:
            key, value, vote = self.decisions.pop(0)
            self.world.yield_(self.name)
            if key not in self.world.items and self.world.created.get(vote[0]) == vote[1]:
                self.world.write(key, value)

    def _write(self, changes, yields=True):
        if yields:
            self.world.yield_(self.name)
        for key, value in changes:
            self.world.write(key, value)
        self._learn(len(self.world.log))

    def _learn(self, until):
        for number, (key, value) in enumerate(self.world.log[self.known : until], self.known + 1):
            self._count(number, key, value)
        self.known = until

    def _count(self, number, key, value):
        vote = vote_key(key)
        if vote is None:
            self._note(key, value)
        elif value is None:
            self.votes.pop(vote.act, None)
        else:
            self.votes.setdefault(vote.act, (key, number))
        if self.tally is not None:
            self.decisions += [(name, text, self.votes[act]) for name, text, act in self.tally.note(key, value)]


class RelaySeat(Seat):
    """The relay of a node: it casts the votes of its workers together, and is as late as any member."""

    def __init__(self, world, name, ranks):
        super().__init__(world, name)
        self.inbox = []
        self.votes = NodeVotes(name, self.get, lambda: ranks)

    @property
    def has_news(self):
        return bool(self.inbox) or super().has_news

    def serve(self, is_over):
        while not is_over():
            self.waits = True
            self.world.yield_(self.name)
            self.waits = False
            if self.known < len(self.world.log):
                self._learn(self.world.rng.randint(self.known + 1, len(self.world.log)))
            while self.inbox and self.world.rng.random() < 0.7:
                self.votes.take(*self.inbox.pop(0))
            for key, votes in self.votes.complete():
                self._write([(key, votes)])

    def _note(self, key, value):
        super()._note(key, value)
        if value is not None:
            self.votes.note(key)
