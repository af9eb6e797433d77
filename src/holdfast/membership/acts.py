"""Acts: the members of a generation each cast a vote, and all of them read one decision.

Votes are many and decisions are few. The store counts the votes (:class:`Tally`), and its clients see only decisions:
a hub counts each vote once, of etcd's clients each counts, and the first one creates the decision. A node's launcher
casts the votes of its workers together (:class:`NodeVotes`).

==========================  =================================================
==========================  =================================================
``g/G/act/N/RANK``          the vote of a member in the N-th act of generation G
``g/G/act/N/node/NODE``     JSON: the votes of the members of a node, by rank
``g/G/act/N/decision``      the decision of an agreement; that of a shrink is ``g/(G + 1)/members``
``g/G/act/N/mixed``         JSON: members, if some voted for another kind of act than others, which is a bug
``g/G/act/NAME/...``        the same for texts that are gathered: the decision is JSON, the text of each member by rank
==========================  =================================================
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_VOTE = re.compile(
    r"(?P<act>(?P<scope>.*?)g/(?P<generation>[0-9]+)/act/(?P<name>[^/]+)/)(?:node/[^/]+|(?P<rank>[0-9]+))"
)
_MEMBERS = re.compile(r"(?P<scope>.*?)g/(?P<generation>[0-9]+)/members")
_MAX_MEMBERS = 1 << 20
_JOIN = re.compile(r"(?P<scope>.*?)join/(?P<rank>[0-9]+)")
_DEAD = "dead/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterVote:
    """A member's vote in an act, ``"agree"`` (with a flag) or ``"shrink"``.

    A shrink may admit newcomers to a training loop (-1: none), and the member may ask to leave.
    """

    act: str
    flag: bool = True
    admits: int = -1
    leaves: bool = False

    def encode(self) -> str:
        """Return the vote as text, for :func:`parse_vote`."""
        return json.dumps({"act": self.act, "flag": self.flag, "admits": self.admits, "leaves": self.leaves})


@dataclass(frozen=True, slots=True)
class VoteKey:
    """What the key of a vote says: its act (a prefix of keys) and the rank; None for the votes of a node."""

    act: str
    scope: str
    generation: int
    gathers: bool
    rank: int | None

    @property
    def next_members(self) -> str:
        """Key of the members of the next generation."""
        return f"{self.scope}g/{self.generation + 1}/members"

    @property
    def decision(self) -> str:
        """Key of the decision, unless the act is a shrink."""
        return f"{self.act}decision"


def vote_key(key: str) -> VoteKey | None:
    """Return what ``key`` says, None if it is not the key of a vote."""
    match = _VOTE.fullmatch(key)
    if match is None:
        return None
    rank = None if match["rank"] is None else int(match["rank"])
    return VoteKey(match["act"], match["scope"], int(match["generation"]), not match["name"].isdecimal(), rank)


def encode_members(members: Iterable[int]) -> str:
    """Return ranks as text for :func:`decode_members`: a JSON list of ranks, where ``[first, last]`` is a run of them.

    So the text grows with the number of workers that a job has lost, not with the number that it has.
    """
    return json.dumps([first if first == last else [first, last] for first, last in _runs(members)])


def describe_members(members: Iterable[int]) -> str:
    """Return ranks as a person writes them, such as ``0-3, 5``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(members))


def _runs(members: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last rank of each run of consecutive ranks, ascending."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(members):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def decode_members(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of :func:`encode_members`; raise ``ValueError`` or ``TypeError`` if it holds none."""
    runs = [(each, each) if type(each) is int else each for each in json.loads(text)]
    ends = [int(rank) for first, last in runs for rank in (first, last)]
    if ends != sorted(ends):
        raise ValueError(f"the ranks of the members must ascend, got {text:.80}")
    if sum(ends[1::2]) - sum(ends[::2]) + len(runs) > _MAX_MEMBERS:
        raise ValueError(f"a job may have {_MAX_MEMBERS} workers, got {text:.80}")
    return tuple(itertools.chain.from_iterable(range(first, last + 1) for first, last in runs))


@functools.lru_cache(maxsize=256)  # most members of a job cast the same votes
def parse_vote(text: str) -> RosterVote:
    """Return the vote in a text; raise ``ValueError`` if it is none."""
    vote = RosterVote(**json.loads(text))
    if vote.act not in ("agree", "shrink") or type(vote.admits) is not int:
        raise ValueError(f"not a vote: {text:.80}")
    return vote


def _loop(wish: str) -> int | None:
    """Return the training loop that a newcomer waits for."""
    try:
        request = json.loads(wish)
    except ValueError:
        return None
    return request.get("loop") if isinstance(request, dict) else None


def check_vote(key: str, value: str) -> None:
    """Raise ``ValueError`` if ``key`` is that of votes or members, and ``value`` does not hold any."""
    try:
        if (vote := vote_key(key)) is not None:
            texts = json.loads(value) if vote.rank is None else {vote.rank: value}
            for rank, text in texts.items():
                int(rank)
                _check_text(vote, text)
        elif _MEMBERS.fullmatch(key):
            decode_members(value)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a value of {key:.80}: {value:.80}") from error


def _check_text(vote: VoteKey, text: str) -> None:
    if type(text) is not str:
        raise ValueError(f"a vote must be a text, got {text!r:.80}")
    if not vote.gathers:
        parse_vote(text)


@dataclass(slots=True)
class _Act:
    """The votes of an act, as texts, and whether it has been decided or cast."""

    key: VoteKey
    votes: dict[int, str] = field(default_factory=dict)
    is_done: bool = False


class ActDecision(NamedTuple):
    """A key to create now and its value, and the act that it decides: a prefix of the keys of its votes."""

    key: str
    value: str
    act: str


class Tally:
    """Counts votes for a store: each call of :meth:`note` is one change, in the order in which the store made them.

    What is written must have passed :func:`check_vote`.
    """

    def __init__(self) -> None:
        self._acts: dict[str, _Act] = {}
        self._members: dict[tuple[str, int], frozenset[int]] = {}
        self._dead: set[int] = set()
        self._joins: dict[str, dict[int, str]] = {}

    def note(self, key: str, value: str | None) -> list[ActDecision]:
        """Take note of a change (None: the key was removed); return the decisions that follow."""
        if vote := vote_key(key):
            return self._note_vote(vote, value)
        if key.startswith(_DEAD) and (rank := key[len(_DEAD) :]).isdecimal():
            (self._dead.discard if value is None else self._dead.add)(int(rank))
            return self._decide(self._acts.values())
        if match := _MEMBERS.fullmatch(key):
            return self._note_members((match["scope"], int(match["generation"])), value)
        if match := _JOIN.fullmatch(key):
            waiting = self._joins.setdefault(match["scope"], {})
            waiting.pop(int(match["rank"]), None)
            if value is not None:
                waiting[int(match["rank"])] = value
        return []

    def _note_vote(self, vote: VoteKey, value: str | None) -> list[ActDecision]:
        if value is None:
            self._acts.pop(vote.act, None)
            return []
        act = self._acts.setdefault(vote.act, _Act(vote))
        cast = json.loads(value).items() if vote.rank is None else [(vote.rank, value)]
        for rank, text in cast:
            act.votes[int(rank)] = text
        return self._decide([act])

    def _note_members(self, at: tuple[str, int], value: str | None) -> list[ActDecision]:
        self._members.pop(at, None)
        if value is not None:
            self._members[at] = frozenset(decode_members(value))
        return self._decide([act for act in self._acts.values() if (act.key.scope, act.key.generation) == at])

    def _decide(self, acts: Iterable[_Act]) -> list[ActDecision]:
        decided = []
        for act in acts:
            members = self._members.get((act.key.scope, act.key.generation))
            if not act.is_done and act.votes and members is not None and self._is_complete(act, members):
                act.is_done = True
                decided.append(ActDecision(*self._decision(act, members), act.key.act))
        return decided

    def _is_complete(self, act: _Act, members: frozenset[int]) -> bool:
        if len(act.votes) + len(self._dead) < len(members):
            return False  # most votes end here, without a look at every member
        return members - self._dead <= act.votes.keys() and not self._is_over(act.key)

    def _is_over(self, key: VoteKey) -> bool:
        """Return whether an act has been decided and may have been removed since: then no late vote decides it again."""
        if key.gathers:
            return False
        return any(scope == key.scope and number > key.generation for scope, number in self._members)

    def _decision(self, act: _Act, members: frozenset[int]) -> tuple[str, str]:
        """Return key and value of the decision of an act in which every member has voted that is not dead."""
        if act.key.gathers:
            return act.key.decision, json.dumps({rank: text for rank, text in act.votes.items() if text})
        votes = {rank: parse_vote(text) for rank, text in act.votes.items()}
        (kind, *other_kinds) = dict.fromkeys(vote.act for vote in votes.values())
        if other_kinds:
            return f"{act.key.act}mixed", json.dumps(sorted(rank for rank, vote in votes.items() if vote.act != kind))
        if kind == "agree":
            agreed = not members & self._dead and all(vote.flag for vote in votes.values())
            return act.key.decision, json.dumps(agreed)
        alive = {rank: vote for rank, vote in votes.items() if rank not in self._dead}
        stay = [rank for rank, vote in alive.items() if not vote.leaves] or list(alive)  # or the state would be lost
        loops = {vote.admits for vote in alive.values()}
        waiting = self._joins.get(act.key.scope, {}) if len(loops) == 1 else {}
        gone = members | self._dead  # a member may not have removed its request yet
        admitted = [rank for rank, wish in waiting.items() if _loop(wish) in loops and rank not in gone]
        return act.key.next_members, encode_members({*stay, *admitted})


class NodeVotes:
    """Collects the votes of the workers of one node, so that they are cast together.

    Args:
        node: Name of the node, unique in the job.
        get: Returns the value of a key of the job's store, None if it does not exist.
        ranks: Returns the workers of this node.
    """

    def __init__(self, node: str, get: Callable[[str], str | None], ranks: Callable[[], Collection[int]]) -> None:
        self._node = node
        self._get = get
        self._ranks = ranks
        self._acts: dict[str, _Act] = {}
        self._members = ("", frozenset[int]())

    def take(self, key: VoteKey, text: str) -> None:
        """Collect a vote that has passed :func:`check_vote`; raise ``ValueError`` if it is that of a node."""
        if key.rank is None:
            raise ValueError("the votes of a node are cast by its launcher")
        act = self._acts.setdefault(key.act, _Act(key))
        act.votes[key.rank] = text
        act.is_done = False

    def note(self, key: str) -> None:
        """Forget the acts that ``key`` decides, once it exists."""
        if match := _MEMBERS.fullmatch(key):
            ended = f"{match['scope']}g/{int(match['generation']) - 1}/"
        elif key.endswith("/decision"):
            ended = key.removesuffix("decision")
        else:
            return
        for act in [act for act in self._acts if act.startswith(ended)]:
            del self._acts[act]

    def complete(self) -> list[tuple[str, str]]:
        """Return the votes to cast now, each once: of acts in which every worker of this node has voted or is dead."""
        ready = [act for act in self._acts.values() if not act.is_done and self._is_complete(act)]
        for act in ready:
            act.is_done = True
        return [(f"{act.key.act}node/{self._node}", json.dumps(act.votes)) for act in ready]

    def _is_complete(self, act: _Act) -> bool:
        text = self._get(f"{act.key.scope}g/{act.key.generation}/members")
        if text is None:
            return False
        if text != self._members[0]:
            self._members = text, frozenset(decode_members(text))
        missing = self._members[1].intersection(self._ranks()) - act.votes.keys()
        return all(self._get(f"{_DEAD}{rank}") is not None for rank in missing)
