"""How a newcomer asks a member for its state before it is admitted, and learns where the member sends it.

===========================  ============================================================
Key                          Value
===========================  ============================================================
``state-for/RANK``           JSON, by the newcomer: its :class:`StateRequest`
``state-at/RANK``            JSON, by the member that it asked: number of the request, address
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from holdfast.membership.acts import decode_members
from holdfast.membership.keyed_hash import keyed_hash
from holdfast.membership.store import Store


class StreamSecrets:
    """What both ends of one stream prove with; each end has its own.

    Args:
        key: Follows from the token and the name of the stream, and is never sent.
    """

    def __init__(self, key: bytes) -> None:
        self.proof = keyed_hash(key, b"proof of the newcomer")
        """The first bytes on the connection, sent by the newcomer."""
        self._key = keyed_hash(key, b"headers of the sender")
        self._number = 0

    def next_mac(self, data: bytes | bytearray) -> bytes:
        """Return the MAC of the next length of a header, or of the header itself: the two alternate."""
        mac = keyed_hash(self._key, self._number.to_bytes(8, "big") + data)
        self._number += 1
        return mac


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A request of a newcomer.

    Args:
        newcomer: Rank that asks.
        giver: Rank of the member that is asked.
        loop: The training loop that the newcomer will join.
        number: Requests of this newcomer before this one.
    """

    newcomer: int
    giver: int
    loop: int
    number: int


class StateRequests:
    """The requests for state in a membership store, as one worker sees them.

    Args:
        store: The store.
        rank: This worker.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._looked_at = -1
        self._taken: set[StateRequest] = set()

    @property
    def own_address(self) -> str:
        """The address of this machine at which the other workers reach it."""
        return self._store.own_address

    def dead(self) -> set[int]:
        """Return the workers that are known to be dead; needs no message."""
        return set(map(int, self._store.under("dead/")))

    def key_for(self, stream: str) -> bytes:
        """Return the key of a stream, which only programs that know the token can derive."""
        return self._store.key_for(f"stream of state {stream}")

    # -- a member

    def take_new(self, loop: int) -> list[StateRequest]:
        """Return the requests to this worker that it has not returned before; takes next to no time."""
        version = self._store.version
        if version == self._looked_at:
            return []
        self._looked_at = version
        requests = [StateRequest(**json.loads(text)) for text in self._store.under("state-for/").values()]
        dead = self.dead()
        own_requests = [r for r in requests if r.giver == self._rank and r.loop == loop and r.newcomer not in dead]
        new = [request for request in own_requests if request not in self._taken]
        self._taken.update(new)
        return new

    def answer(self, request: StateRequest, address: str) -> None:
        """Tell the newcomer where the state is; "" if this worker cannot send it."""
        self._store.put(f"state-at/{request.newcomer}", json.dumps([request.number, address]))

    # -- a newcomer

    def living_members(self) -> tuple[int, ...]:
        """Return the members of the newest generation that are not known to be dead."""
        generations = {
            int(key.partition("/")[0]): text
            for key, text in self._store.under("g/").items()
            if key.endswith("/members")
        }
        dead = self.dead()
        members = decode_members(generations[max(generations)]) if generations else ()
        return tuple(rank for rank in members if rank not in dead)

    def ask(self, request: StateRequest) -> str:
        """Ask for the state; return host, port and key with which it is to be had, "" if the member cannot send it.

        Raises:
            StoreLost: if the store is lost.
        """
        self._store.put(f"state-for/{self._rank}", json.dumps(dataclasses.asdict(request)))

        def answered() -> str | None:
            number, address = json.loads(self._store.get(f"state-at/{self._rank}") or '[-1, ""]')
            if number == request.number:
                return self._with_key(str(address))
            return None if self.can_give(request) else ""

        return self._store.wait(answered) or ""

    def _with_key(self, address: str) -> str:
        host, port, stream = address.split(" ")
        return f"{host} {port} {self.key_for(stream).hex()}"

    def can_give(self, request: StateRequest) -> bool:
        """Return whether the member that was asked is alive, and the training loop goes on."""
        return request.giver in self.living_members() and int(self._store.get("loop") or 0) <= request.loop

    def withdraw(self) -> None:
        """Remove the request of this worker, and its answer."""
        self._store.delete(f"state-for/{self._rank}")
        self._store.delete(f"state-at/{self._rank}")
