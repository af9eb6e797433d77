"""Saying that this process waits for others: whoever watches from outside blames those who do not.

A process has one place where it waits at a time, so this is a thing of the process. Unless somebody wants to hear of it,
it costs less than a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable


class Waiting:
    """A context in which this process waits for others; may be entered again within itself."""

    def __init__(self) -> None:
        self._depth = 0
        self._tell: Callable[[bool], None] | None = None

    def tell(self, hear: Callable[[bool], None] | None) -> None:
        """Call ``hear(True)`` when waiting begins and ``hear(False)`` when it is over, from now on; None calls nobody."""
        self._tell = hear

    def __enter__(self) -> None:
        self._depth += 1
        if self._tell is not None and self._depth == 1:
            self._tell(True)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._tell is not None and self._depth == 0:
            self._tell(False)


waiting = Waiting()
"""Of this process."""
