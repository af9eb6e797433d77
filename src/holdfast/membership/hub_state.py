"""What a hub stores: keys, leases and sessions, changed by operations only, so that equal operations give equal states.

===========  ====================================================================
``open``     ``session`` begins for ``job``
``put``      write ``key``; with ``leased``, until the session expires
``create``   write ``key`` unless it exists
``delete``   remove ``key``, or all keys under it
``expire``   remove the leased keys of ``session``; with ``forget``, end it
===========  ====================================================================

The votes of acts (:mod:`~holdfast.membership.acts`) are counted here: the decision is a change of the operation that
brought the last vote, or the report of a death.

A client whose hub was lost repeats its last request at the next one. The number of the last request of each session,
and its outcome, make sure that it is executed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast.membership.acts import Tally
from holdfast.membership.store import remove

Operation = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of an operation, and the keys that it changed: job, key, and value, None if it was removed."""

    done: bool
    changes: list[tuple[str, str, str | None]]


@dataclass(slots=True)
class _Session:
    """A client: its job, and the number and outcome of its last request."""

    job: str
    number: int = 0
    done: bool = False


@dataclass(slots=True)
class HubState:
    """Keys and values of each job, the owners of leased keys, and all sessions."""

    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    sessions: dict[str, _Session] = field(default_factory=dict)
    _tallies: dict[str, Tally] = field(default_factory=dict)

    def apply(self, operation: Operation) -> Applied:
        """Execute an operation."""
        session = self.sessions.get(operation.get("session", ""))
        number = operation.get("number")
        if session is not None and number is not None:
            if number <= session.number:
                return Applied(session.done, [])
            session.number = number
        applied = self._apply(operation)
        self._count(applied.changes)
        if session is not None:
            session.done = applied.done
        return applied

    def _apply(self, operation: Operation) -> Applied:
        match operation["op"]:
            case "open":
                self.sessions[operation["session"]] = _Session(operation["job"])
                self.jobs.setdefault(operation["job"], {})
                return Applied(done=True, changes=[])
            case "expire":
                return Applied(done=True, changes=self._expire(operation["session"], forget=operation["forget"]))
            case "delete":
                return Applied(done=True, changes=self._delete(operation["job"], operation["key"]))
            case "create" if operation["key"] in self.jobs[operation["job"]]:
                return Applied(done=False, changes=[])
        job, key, value = operation["job"], operation["key"], operation["value"]
        self.jobs[job][key] = value
        self.owners.pop((job, key), None)
        if operation.get("leased") and operation["session"] in self.sessions:
            self.owners[job, key] = operation["session"]
        return Applied(done=True, changes=[(job, key, value)])

    def _count(self, changes: list[tuple[str, str, str | None]]) -> None:
        """Create the decisions that follow from ``changes``, and add them."""
        for job, key, value in changes:  # which grow meanwhile
            for name, decision, _ in self._tallies.setdefault(job, Tally()).note(key, value):
                if name not in self.jobs[job]:
                    self.jobs[job][name] = decision
                    changes.append((job, name, decision))

    def leased(self, session: str) -> list[tuple[str, str]]:
        """Return job and name of the keys that a session has leased."""
        return [where for where, owner in self.owners.items() if owner == session]

    def _expire(self, session: str, *, forget: bool) -> list[tuple[str, str, str | None]]:
        changes: list[tuple[str, str, str | None]] = []
        for job, key in self.leased(session):
            changes += self._delete(job, key)
        if forget:
            self.sessions.pop(session, None)
        return changes

    def _delete(self, job: str, key: str) -> list[tuple[str, str, str | None]]:
        gone = remove(self.jobs[job], key)
        for name in gone:
            self.owners.pop((job, name), None)
        return [(job, name, None) for name in gone]

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "jobs": self.jobs,
            "owners": [[*where, owner] for where, owner in self.owners.items()],
            "sessions": {name: [each.job, each.number, each.done] for name, each in self.sessions.items()},
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> HubState:
        """Return the state that :meth:`dump` returned."""
        state = cls(
            {job: dict(items) for job, items in dumped["jobs"].items()},
            {(job, key): owner for job, key, owner in dumped["owners"]},
            {name: _Session(*each) for name, each in dumped["sessions"].items()},
        )
        state._count([(job, key, value) for job, items in state.jobs.items() for key, value in items.items()])
        return state
