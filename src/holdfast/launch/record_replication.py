"""What the launchers tell each other of their workers' records: for each node a ring in the store, :mod:`.nodes` says where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.membership import Store
from holdfast.records.beacon import Position
from holdfast.records.encoding import record_from_dict, record_to_dict
from holdfast.records.types import Record

_SLOTS = 4096
"""Batches of records that a launcher may be behind another; at most fifty are told in a second."""
_BATCH_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """A record of another node's worker, from which start of the job, and where the worker was if it tells its end."""

    start: int
    record: Record
    position: Position | None = None


class Telling:
    """Tells the others, and hears them, from where this node's launchers and theirs have got to; those of this node first."""

    def __init__(self, store: Store, node: int) -> None:
        self._store = store
        self._node = node
        self._next: dict[int, int] = {}
        for key, text in store.under("told/").items():
            teller, number = int(key.partition("/")[0]), json.loads(text)["number"]
            self._next[teller] = min(self._next.get(teller, number), number)
        self._old = list(self._hear_of(node))
        self._told = self._next[node] - 1

    def tell(self, start: int, records: Sequence[tuple[Record, Position | None]]) -> None:
        """Let the others know what the workers of this node wrote, and where those were that have ended."""
        for batch in _batches(records):
            self._told += 1
            text = json.dumps({"number": self._told, "start": start, "records": batch})
            self._store.put(f"told/{self._node}/{self._told % _SLOTS}", text)

    def hear(self, nodes: Iterable[int]) -> list[Told]:
        """Return what these nodes told since the last call, in the order of time."""
        heard, self._old = self._old, []
        heard += [told for node in nodes for told in self._hear_of(node)]
        return sorted(heard, key=lambda told: (told.start, told.record.t_s))

    def _hear_of(self, node: int) -> Iterator[Told]:
        self._next.setdefault(node, 1)
        while (text := self._store.get(f"told/{node}/{self._next[node] % _SLOTS}")) is not None:
            said = json.loads(text)
            if said["number"] < self._next[node]:
                return  # that slot's turn has not come again
            self._next[node] = said["number"] + 1
            for line, position in said["records"]:
                where = None if position is None else Position(**{**position, "samples": tuple(position["samples"])})
                yield Told(said["start"], record_from_dict(line), where)


def _batches(records: Sequence[tuple[Record, Position | None]]) -> Iterator[list[Any]]:
    """Yield what to tell, in pieces that a store takes."""
    batch: list[Any] = []
    size = 0
    for record, position in records:
        line = [record_to_dict(record), None if position is None else asdict(position)]
        length = len(json.dumps(line))
        if batch and size + length > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += length
    if batch:
        yield batch
