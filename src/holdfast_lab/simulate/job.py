"""The work of a job, and its policy for failures."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, MOST_STEPS, check_choice, check_range

STRATEGIES = ("rollback", "forward", "restart", "reinit", "partial", "relaunch")
"""Those of :mod:`holdfast.recovery`, and ``relaunch``: no survivor continues; the launcher restarts the job from the
newest checkpoint once as many workers as before are available. This is a launcher without fault tolerance.
"""

MODELS = ("replicated", "mirrored", "split")
"""How the model is held: by every worker; each part by several workers; each part by one worker, with whose failure it
is lost."""

"""When the optimizer runs: after the commit vote, or bucket by bucket, overlapped with the following all-reduces."""

_MOST = {"steps": MOST_STEPS, "min_workers": 10**7, "start_workers": 10**7, "slices": 10**9, "buckets": 10**6}
"""Larger values exceed 64 bits when they are multiplied with times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """The work of a job, and its policy for failures.

    Args:
        strategy: One of :data:`STRATEGIES`.
        steps: Mini-batches to train, 1 to 10^11; None trains until ``horizon_s``.
        horizon_s: When the simulation ends, seconds, ``> 0``; by default ten times the undisturbed duration of
            ``steps``.
        save_every: Steps between two checkpoints, ``>= 0``; 0 saves nothing.
        min_workers: With fewer survivors the job saves and stops, and is restarted when enough are available, ``>= 1``.
        start_workers: Available workers needed to start the job; by default ``min_workers``, for ``relaunch`` all.
        slices: Slices of a mini-batch; by default one per worker. A worker computes whole slices.
        split: ``"slices"``: whole slices are reassigned; ``"even"``: the mini-batch is divided anew, so all finish
            together.
        batch: ``"global"``: the mini-batch keeps its size; ``"local"``: each worker keeps its part, and the mini-batch
            shrinks.
        buckets: All-reduces of a step besides the commit vote, ``>= 1``.
        model: One of :data:`MODELS`.
        reinit_from: ``reinit`` restores a ``"snapshot"`` taken at the failure, or the ``"checkpoint"``; if the model is
            not replicated, always the latter.
        overlap_optimizer: Whether buckets are updated while others are still reduced; needs a replicated model.
        mirror_every: Under ``partial`` with a split model: steps in which a delta standby receives as many bytes as a
            full copy has, 2 to 10^9. (With 1 the standbys are exact: that is a mirrored model.)

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
    overlap_optimizer: bool = False
    mirror_every: int = 16

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("split", self.split, ("slices", "even"))
        check_choice("batch", self.batch, ("global", "local"))
        check_choice("model", self.model, MODELS)
        check_choice("reinit_from", self.reinit_from, ("snapshot", "checkpoint"))
        if self.overlap_optimizer and self.model != "replicated":
            raise ConfigError(f"overlap_optimizer needs a replicated model, got model {self.model}")
        check_range("save_every", self.save_every, 0, most=10**9)
        check_range("mirror_every", self.mirror_every, 2, most=10**9)
        for name, most in _MOST.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, most=most)
        if self.horizon_s is not None:
            check_range("horizon_s", self.horizon_s, 0, above=True, most=LONGEST_S)
        if self.steps is None and self.horizon_s is None:
            raise ConfigError("a job needs steps, horizon_s, or both; otherwise it never ends")
