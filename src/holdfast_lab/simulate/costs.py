"""The cost of every operation, as plain data. ``price_table.py`` derives the costs by number of members."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, check_range

OF_STORAGE = ("state_bytes", "write_bytes_per_s", "read_bytes_per_s", "snapshot_bytes_per_s")
"""Size and speeds from which :data:`SAVING` is derived; see :meth:`Costs.of_storage`."""
SAVING = ("save_s", "save_background_s", "load_s")

STALE_SHARE = 0.25
"""What a failure costs under ``partial`` in further steps, as a share of ``mirror_every``. ``holdfast study scar`` found
0.20 to 0.24 for logistic regression on digits, with half of the parameters lost and standbys that are sent whole, rounded
up here; less is lost with one of many nodes."""
STALE_SOURCE = "0.25 x --mirror-every: holdfast study scar, half of the parameters lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds and bytes, all ``>= 0``; ``n`` is the number of members, spares included.

    Args:
        slice_s: Time for one worker to compute the gradients of one slice.
        straggle: Standard deviation of a worker's time over its mean; a step waits for the slowest worker. Times are
            assumed normal, so the slowest of ``m`` takes ``1 + straggle * E[largest of m normal numbers]`` times the
            mean.
        sum_s: The part of a step's all-reduces that does not depend on ``n``; includes the optimizer unless
            ``update_s`` is given.
        sum_hop_s: Latency: ``sum_hop_s * log2(n)`` for all all-reduces of a step.
        sum_bytes: Gradients of a step; with ``link_bytes_per_s`` they take ``2 (n-1)/n * sum_bytes / link_bytes_per_s``
            (reduce-scatter and allgather: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005).
        link_bytes_per_s: Bandwidth of one worker's link, ``> 0``.
        steps_s: Measured steps, as ``(members, seconds)``; replaces the formula of the whole step. Values between them
            are interpolated linearly, and constant beyond the ends. The all-reduces keep their formula; the rest is
            computing.
        update_s: Time for the optimizer to update all buckets of a step, added to the step. Give it only if the step
            excludes it.
        copy_s: With the overlapped optimizer, time for the undo copies of all buckets of a step.
        undo_s: Time to undo the updates of all buckets of a step; fewer buckets take a proportional share.
        detect_s: From a failure to its detection by the last survivor, once survivors wait in an all-reduce.
        regroup_s: From there until all know each other's progress: revoke, agree, shrink, agree, share, agree.
        regroup_hop_s: Further regrouping time: ``regroup_hop_s * log2(n)``.
        save_s: How long a checkpoint holds training.
        save_background_s: How long it is then written in the background. It is of no use until then, and the next
            checkpoint waits for it. It is complete only when its step is durable: after the first all-reduce of the
            next step.
        load_s: Time for all workers to load a checkpoint.
        restart_s: Time for the launcher to start the job: processes, libraries, the model.
        rebuild_s: Time for ``reinit`` to tear down and rebuild the application, including the snapshot.
        rehome_s: Time to move parts of a split model to new owners, including restoring them.
        spawn_s: From the repair of a machine until a new worker there is ready to join. No other worker waits for it.
        rejoin_s: State transfer to a newcomer. All members wait for it after they have regrouped.
        stale_iterations: Further steps that a failure costs under ``partial``, which restores the lost part of a split
            model as it was some steps ago; None: :data:`STALE_SHARE` of the job's ``mirror_every``.

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
    stale_iterations: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "link_bytes_per_s":
                check_range(one.name, value, 0, above=True)
            elif one.name == "sum_bytes":
                check_range(one.name, value, 0)
            elif one.name == "stale_iterations":
                check_range(one.name, value or 0, 0, most=10**9)
            elif one.name != "steps_s":
                check_range(one.name, value, 0, most=LONGEST_S)
        members = [number for number, _ in self.steps_s]
        if members != sorted(set(members)) or any(number < 1 for number in members):
            raise ConfigError(
                f"steps_s must be pairs (members, seconds) with ascending members from 1, got members {members}"
            )
        for number, seconds in self.steps_s:
            check_range(f"the time in steps_s for {number} members", seconds, 0, above=True, most=LONGEST_S)

    @classmethod
    def of_storage(
        cls, state_bytes: float, write_bytes_per_s: float, *, read_bytes_per_s: float | None = None,
        snapshot_bytes_per_s: float | None = None, **others: float,
    ) -> Costs:  # fmt: skip
        """Return costs whose saving and loading are derived from sizes and speeds.

        Args:
            state_bytes: Size of a checkpoint.
            write_bytes_per_s: Write speed of all writers together.
            read_bytes_per_s: Read speed of all readers together; by default the write speed.
            snapshot_bytes_per_s: Speed at which all workers together copy the state while training is held; it is then
                written in the background. By default training is held while the state is written.
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
        return cls(**(chosen | others))  # type: ignore[arg-type]  # the constructor checks the names


def _over(name: str, state_bytes: float, bytes_per_s: float) -> float:
    check_range("state_bytes", state_bytes, 0)
    check_range(name, bytes_per_s, 0, above=True)
    return state_bytes / bytes_per_s
