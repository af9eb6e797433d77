"""What is to be done, and what is done about failures."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, MOST_STEPS, check_choice, check_range

STRATEGIES = ("rollback", "forward", "restart", "reinit", "partial", "relaunch")
"""Those of :mod:`holdfast.recovery`, and ``relaunch``: no survivor goes on, the launcher starts all again from the newest
checkpoint once as many as before are there. That is what a launcher without fault tolerance does."""

MODELS = ("replicated", "mirrored", "split")
"""Who holds the model: everybody; of each part more than one; of each part one, so that it is lost with its holder."""

UPDATES = ("lazy", "eager")
"""When the optimizer runs: after the closing sum; or bucket by bucket, beside the sums that follow."""

_MOST = {"steps": MOST_STEPS, "min_workers": 10**7, "start_workers": 10**7, "slices": 10**9, "buckets": 10**6}
"""More of these would leave 64 bits when they are multiplied with times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done, and what is done about failures.

    Args:
        strategy: One of :data:`STRATEGIES`.
        steps: Mini-batches to be done, 1 to 10^11; None goes on until ``horizon_s``.
        horizon_s: When to stop looking, seconds, ``> 0``; by default ten times as long as ``steps`` take undisturbed.
        save_every: Steps between two checkpoints, ``>= 0``; 0 saves nothing.
        min_workers: With fewer survivors the job is saved and stopped, and started again when there are as many, ``>= 1``.
        start_workers: The job is started when as many workers are there; by default ``min_workers``, for ``relaunch`` all.
        slices: Pieces of a mini-batch; by default one for each worker. A worker computes whole ones.
        split: ``"slices"``: whole slices change hands; ``"even"``: cut anew, so that all finish together.
        batch: ``"global"``: the mini-batch keeps its size; ``"local"``: each worker keeps its part, the mini-batch shrinks.
        buckets: Sums of a step beside the closing one, ``>= 1``.
        model: One of :data:`MODELS`.
        reinit_from: ``reinit`` goes on from a ``"snapshot"`` taken at the failure, or from the ``"checkpoint"``; where the model
            is not replicated, always from the latter.
        update: One of :data:`UPDATES`; eager ones need a model that is replicated.

    Raises:
        ConfigError: if a value is not allowed.
    """

    strategy: str = "rollback"
    steps: int | None = None
    horizon_s: float | None = None
    save_every: int = 0
    min_workers: int = 1
    start_workers: int | None = None
    slices: int | None = None
    split: str = "slices"
    batch: str = "global"
    buckets: int = 1
    model: str = "replicated"
    reinit_from: str = "snapshot"
    update: str = "lazy"

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("split", self.split, ("slices", "even"))
        check_choice("batch", self.batch, ("global", "local"))
        check_choice("model", self.model, MODELS)
        check_choice("reinit_from", self.reinit_from, ("snapshot", "checkpoint"))
        check_choice("update", self.update, UPDATES)
        if self.update == "eager" and self.model != "replicated":
            raise ConfigError(
                f"update eager needs a model that every worker has all of, got model {self.model}: use update lazy"
            )
        check_range("save_every", self.save_every, 0, most=10**9)
        for name, most in _MOST.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, most=most)
        if self.horizon_s is not None:
            check_range("horizon_s", self.horizon_s, 0, above=True, most=LONGEST_S)
        if self.steps is None and self.horizon_s is None:
            raise ConfigError("a job needs steps, horizon_s, or both: otherwise it never ends")
