"""Messages of a Gloo group in rounds: terms arrive and results leave while the terms of later rounds are on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.comm.base import Placed, Round
from holdfast.comm.groups import ThreadedWork, wait
from holdfast.comm.memory import as_bytes

TERMS_TAG, RESULTS_TAG = (1 << 30) + 4, (1 << 30) + 5
"""Tags of the messages; larger than those of ``sendrecv``."""


class GlooRounds:
    """Starts all receives, and all sends of terms, of :meth:`~holdfast.comm.base.RoundMessages.sendrecv_rounds`.

    Args:
        group: The process group.
        rounds: The messages.
    """

    def __init__(self, group: Any, rounds: Sequence[Round]) -> None:
        self._group = group
        self._rounds = rounds
        self._terms = [self._receive(each.take, TERMS_TAG) for each in rounds]
        self._left = [work for each in rounds for work in self._receive(each.take_results, RESULTS_TAG)]
        for each in rounds:
            self._send(each.give, TERMS_TAG)

    def run(self, add: Callable[[int], None], check: Callable[[], None]) -> None:
        """Add each round once its terms have arrived, send its results, and wait for everything; ``check`` meanwhile."""
        try:
            for number, (each, terms) in enumerate(zip(self._rounds, self._terms, strict=True)):
                wait(self._end_of(terms), check)
                add(number)
                self._send(each.give_results, RESULTS_TAG)
            wait(self._end_of(self._left), check)
        except BaseException:
            self._end_of(
                [*self._left, *(work for works in self._terms for work in works)]
            )  # keeps their memory until then
            raise

    def _receive(self, messages: Placed, tag: int) -> list[Any]:
        return [self._group.recv([as_bytes(data)], place, tag) for place, data in messages if data.numel()]

    def _send(self, messages: Placed, tag: int) -> None:
        self._left += [self._group.send([as_bytes(data)], place, tag) for place, data in messages if data.numel()]

    def _end_of(self, works: Sequence[Any]) -> ThreadedWork:
        # Gloo reports the arrival of a message only to a thread that waits for it.
        return ThreadedWork(lambda: [work.wait() for work in works], keep=self._rounds)
