"""Which workers keep a start of the job from beginning. Pure: no clock, process or file.

A worker has arrived once it asks to be connected with the others. It runs imports and the script's own preparations before,
which may take long by nature: the limit is the timeout, or three times what the slowest arrival took so far. A worker that is
not there by then is stuck if it gives no sign of life, or if another one has waited for it as long as the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.launch.hangs import Stuck
from holdfast.records import UNCONNECTED

_TIMES = 3.0
"""So many times what the slowest worker took to arrive."""
WARN_AFTER_S = 10.0
"""After so long without an arrival, say for which workers the others wait."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What is seen of a worker.

    Args:
        phase: Where it is, one of :data:`holdfast.records.PHASES`; "" if it is not known yet.
        pulse: Grows while its interpreter runs.
        beats: Grows whenever it reports its phase.
        waits: It waits for others.
        is_stopped: Its process is stopped by a signal.
    """

    phase: str = ""
    pulse: int = 0
    beats: int = 0
    waits: bool = False
    is_stopped: bool = False

    @property
    def is_late(self) -> bool:
        """Whether it has not asked for the others yet."""
        return self.phase in ("", "launch")

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for others."""
        return self.waits or self.phase == "connect"


@dataclass(slots=True)
class _Sight:
    """The last sign of a worker.

    Args:
        sign: What was seen.
        began_s: When it was seen first.
        moved_s: When it was last seen to get further, or to begin to wait.
        alive_s: When it last gave a sign of life.
    """

    sign: Sign
    began_s: float
    moved_s: float
    alive_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be done about a start.

    Args:
        stuck: Workers to give up.
        lost: Why the start is lost though no worker is to blame, "" if it is not.
        warning: What the user should know, "" if nothing is new.
    """

    stuck: Sequence[Stuck] = ()
    lost: str = ""
    warning: str = ""


@dataclass(slots=True)
class Starting:
    """Looks at the workers of this node from the moment they are started until all are connected.

    Args:
        timeout_s: The least time that a worker has to arrive; 0: as long as it likes.
        script: Name of the script, for messages.
    """

    timeout_s: float
    script: str
    _seen: dict[int, _Sight] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _slowest_s: float = 0.0
    _quiet_since_s: float | None = None
    _warned: bool = False
    keeps_waiting: bool = field(default=False, init=False)
    """Whether a worker of this node has waited for an unconnected one as long as the limit."""

    def begin(self) -> None:
        """Reset: the job is started, or started again."""
        self._seen.clear()
        self._given_up.clear()
        self._quiet_since_s = None
        self._warned = False
        self.keeps_waiting = False

    @property
    def limit_s(self) -> float:
        """How long a worker has to arrive, as far as is known by now; 0: as long as it likes."""
        return self.timeout_s and max(self.timeout_s, _TIMES * self._slowest_s)

    def look(self, signs: Mapping[int, Sign], now_s: float, *, elsewhere: bool = False) -> Finding:
        """Return what is to be done; each worker is given up once.

        Args:
            signs: Of all living workers of this node.
            now_s: The time, seconds.
            elsewhere: A worker of another node has waited as long as the limit.
        """
        for rank, sign in signs.items():
            self._note(rank, sign, now_s)
        unconnected = [r for r, s in signs.items() if not s.phase or s.phase in UNCONNECTED]
        if not unconnected or not self.timeout_s:
            self.keeps_waiting, self._quiet_since_s = False, None
            return Finding()
        waited_s = max((now_s - self._seen[r].moved_s for r, s in signs.items() if s.is_waiting), default=0.0)
        self.keeps_waiting = waited_s > self.limit_s
        if not self._given_up.isdisjoint(unconnected):  # its end is not recorded yet
            return Finding()
        late = [rank for rank in unconnected if signs[rank].is_late]
        stuck = [s for rank in late if (s := self._stuck(rank, now_s, waited_s, elsewhere=elsewhere)) is not None]
        lost = ""
        if not late and all(now_s - self._seen[rank].moved_s > self.timeout_s for rank in unconnected):
            stuck, lost = self._blame_connecting(unconnected, now_s)
        self._given_up.update(found.rank for found in stuck)
        return Finding(stuck, lost, self._warning(late or unconnected, now_s))

    def _note(self, rank: int, sign: Sign, now_s: float) -> None:
        seen = self._seen.get(rank)
        if seen is None:
            self._seen[rank] = _Sight(sign, now_s, now_s, now_s)
            self._quiet_since_s = now_s
            return
        before, seen.sign = seen.sign, sign
        if before.pulse != sign.pulse:
            seen.alive_s = now_s
        if replace(before, pulse=sign.pulse, is_stopped=sign.is_stopped) != sign:
            seen.moved_s = seen.alive_s = self._quiet_since_s = now_s
        if before.is_late and not sign.is_late:
            self._slowest_s = max(self._slowest_s, now_s - seen.began_s)

    def _stuck(self, rank: int, now_s: float, waited_s: float, *, elsewhere: bool) -> Stuck | None:
        seen = self._seen[rank]
        taken_s, silent_s = now_s - seen.began_s, now_s - seen.alive_s
        if silent_s > self.limit_s:
            return Stuck(rank, silent_s, f"{self._state(seen.sign)} for {silent_s:.1f} s while the job starts")
        if taken_s > self.limit_s and (elsewhere or waited_s > self.limit_s):
            what = f"{self._state(seen.sign)} {taken_s:.1f} s after its start, and the others wait for it"
            return Stuck(rank, taken_s, f"{what}; if it may take so long: --start-timeout")
        return None

    def _blame_connecting(self, unconnected: Sequence[int], now_s: float) -> tuple[list[Stuck], str]:
        """Return which of the workers that all wait to be connected are stopped; if none is, why the start is lost."""
        stopped = [rank for rank in unconnected if self._seen[rank].sign.is_stopped]
        if stopped:
            since = ((rank, now_s - self._seen[rank].alive_s) for rank in stopped)
            return [Stuck(rank, s, f"is stopped for {s:.1f} s while the job starts") for rank, s in since], ""
        return [], f"the workers were not connected within {self.timeout_s:g} s though all of them had asked for it"

    def _warning(self, blamed: Sequence[int], now_s: float) -> str:
        if self._warned or self._quiet_since_s is None or now_s - self._quiet_since_s < WARN_AFTER_S:
            return ""
        if all(seen.sign.phase == "launch" and not seen.sign.is_stopped for seen in self._seen.values()):
            return ""  # the script is still preparing, and no worker waits for another
        self._warned = True
        states: dict[str, list[int]] = {}
        for rank in sorted(blamed):
            states.setdefault(self._state(self._seen[rank].sign), []).append(rank)
        who = "; ".join(f"{_ranks(ranks)} {state}" for state, ranks in states.items())
        return f"the job has not begun after {now_s - min(s.began_s for s in self._seen.values()):.0f} s: {who}"

    def _state(self, sign: Sign) -> str:
        if sign.is_stopped:
            return "is stopped"
        if not sign.phase:
            return "has not started"
        if sign.phase == "launch":
            return f"is still importing, or preparing in {self.script}"
        return "waits to be connected"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {', '.join(map(str, ranks))}"
