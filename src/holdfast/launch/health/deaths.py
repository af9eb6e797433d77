"""The register of deaths of one start of a job, to which everything that sees a worker die reports.

The thread that waits for the end of each worker reports here at once (:mod:`holdfast.launch.health.killed_workers`), then the record
bus, when it reads how a worker ended, and the launchers of other nodes, when a node is lost with its workers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from holdfast.errors import StoreLost
from holdfast.membership import Store


@dataclass(frozen=True, slots=True)
class DeathRegister:
    """Notifies the survivors of deaths, and launchers that come late. Reports are those of its start only, however late.

    Args:
        members: The workers' store; None if their fabric notifies them.
        launchers: The launchers' store; None if there is one launcher.
        start: Number of the start.
        node: Rank of this node.
    """

    members: Store | None = None
    launchers: Store | None = None
    start: int = 0
    node: int = 0

    def report(self, rank: int, cause: str) -> None:
        """Notify the workers that ``rank`` has died; for any thread."""
        if self.members is not None:
            with contextlib.suppress(StoreLost):  # then no worker continues
                self.members.put(f"dead/{rank}", cause)

    def note_end(self, rank: int, cause: str = "") -> None:
        """Record that a worker has ended, or was given up; if it died, notify the workers of the ``cause``."""
        if cause:
            self.report(rank, cause)
        if self.launchers is not None:
            with contextlib.suppress(StoreLost):  # detected at the launcher's next check
                self.launchers.put(f"gone/{self.start}/{rank}", str(self.node))

    def noted_by(self, rank: int) -> str | None:
        """Return the node whose launcher recorded that a worker has ended; None if none did."""
        return None if self.launchers is None else self.launchers.get(f"gone/{self.start}/{rank}")
