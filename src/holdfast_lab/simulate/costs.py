"""What everything takes: plain data. What follows from it for each number of members stands in ``price_table.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, check_range

OF_STORAGE = ("state_bytes", "write_bytes_per_s", "read_bytes_per_s", "snapshot_bytes_per_s")
"""Size and speeds from which :data:`SAVING` follows; see :meth:`Costs.of_storage`."""
SAVING = ("save_s", "save_background_s", "load_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes, all ``>= 0``; ``n`` are the members, spares included.

    Args:
        slice_s: One worker computes the gradients of one slice.
        straggle: A step waits for the slowest: standard deviation of a worker's time over its mean. Times are taken to be
            normal, so the slowest of ``m`` takes ``1 + straggle * E[largest of m normal numbers]`` times the mean.
        sum_s: All sums of a step, and the optimizer if ``update_s`` does not say it: what does not depend on ``n``.
        sum_hop_s: Latency: ``sum_hop_s * log2(n)`` for all sums of a step.
        sum_bytes: Gradients of a step; with ``link_bytes_per_s`` they take ``2 (n-1)/n * sum_bytes / link_bytes_per_s``
            (reduce-scatter and allgather: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005).
        link_bytes_per_s: Of one worker's link, ``> 0``.
        steps_s: Measured steps, as ``(members, seconds)``: in the place of the formula of the whole step. Straight lines lie
            between them, and beyond the ends it stays as it is. The sums keep their formula, and the rest is computing.
        update_s: The optimizer updates all buckets of a step, where that is not in the step already: it is added.
        copy_s: With updates that are eager, the undo copies of all buckets of a step.
        undo_s: All buckets of a step are put back; of fewer, their share of it.
        detect_s: From a death to the last survivor that knows, once survivors wait in a sum.
        regroup_s: From there until all know everybody's progress: revoke, agree, shrink, agree, share, agree.
        regroup_hop_s: More of that: ``regroup_hop_s * log2(n)``.
        save_s: How long training is held for a checkpoint.
        save_background_s: How long after that it is written. Training goes on meanwhile; until then it is no help. The next one
            waits for it. It is complete no earlier than its step is stable: when the first sum of the next one is done.
        load_s: Everybody loads a checkpoint.
        restart_s: The launcher starts the job: processes, libraries, the model.
        rebuild_s: ``reinit`` takes the application down and builds it again, the snapshot included.
        rehome_s: Parts of a split model get new homes, restored if need be.
        spawn_s: From the repair of a machine until a new worker waits there to be let in. Nobody waits for it.
        rejoin_s: Give a newcomer the state. All wait for it, after they have regrouped.

    Raises:
        ConfigError: if a number is negative, or ``steps_s`` is not in order.
    """

    slice_s: float = 0.0
    straggle: float = 0.0
    sum_s: float = 0.0
    sum_hop_s: float = 0.0
    sum_bytes: float = 0.0
    link_bytes_per_s: float = math.inf
    steps_s: tuple[tuple[int, float], ...] = ()
    update_s: float = 0.0
    copy_s: float = 0.0
    undo_s: float = 0.0
    detect_s: float = 0.0
    regroup_s: float = 0.0
    regroup_hop_s: float = 0.0
    save_s: float = 0.0
    save_background_s: float = 0.0
    load_s: float = 0.0
    restart_s: float = 0.0
    rebuild_s: float = 0.0
    rehome_s: float = 0.0
    spawn_s: float = 0.0
    rejoin_s: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "link_bytes_per_s":
                check_range(one.name, value, 0, above=True)
            elif one.name == "sum_bytes":
                check_range(one.name, value, 0)
            elif one.name != "steps_s":
                check_range(one.name, value, 0, most=LONGEST_S)
        members = [number for number, _ in self.steps_s]
        if members != sorted(set(members)) or any(number < 1 for number in members):
            raise ConfigError(
                f"steps_s must be pairs (members, seconds) with members growing from 1, got members {members}"
            )
        for number, seconds in self.steps_s:
            check_range(f"steps_s of {number} members", seconds, 0, above=True, most=LONGEST_S)

    @classmethod
    def of_storage(
        cls, state_bytes: float, write_bytes_per_s: float, *, read_bytes_per_s: float | None = None,
        snapshot_bytes_per_s: float | None = None, **others: float,
    ) -> Costs:  # fmt: skip
        """Return costs whose saving and loading follow from sizes and speeds.

        Args:
            state_bytes: What a checkpoint holds.
            write_bytes_per_s: All writers together.
            read_bytes_per_s: All readers together; by default the same.
            snapshot_bytes_per_s: How fast the state is copied while training is held, all together; the rest is written beside training.
                By default all is written while it is held.
            **others: The other costs.

        Raises:
            ConfigError: if a speed is not positive.
        """
        write_s = _over("write_bytes_per_s", state_bytes, write_bytes_per_s)
        load_s = write_s if read_bytes_per_s is None else _over("read_bytes_per_s", state_bytes, read_bytes_per_s)
        held_s = write_s
        if snapshot_bytes_per_s is not None:
            held_s = _over("snapshot_bytes_per_s", state_bytes, snapshot_bytes_per_s)
        behind_s = 0.0 if snapshot_bytes_per_s is None else write_s
        chosen: dict[str, float] = {"save_s": held_s, "save_background_s": behind_s, "load_s": load_s}
        return cls(**(chosen | others))  # type: ignore[arg-type]  # the names are checked by the constructor


def _over(name: str, state_bytes: float, bytes_per_s: float) -> float:
    check_range("state_bytes", state_bytes, 0)
    check_range(name, bytes_per_s, 0, above=True)
    return state_bytes / bytes_per_s
