"""What is simulated: the machines, and the job that runs on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, MOST_STEPS, check_choice, check_range
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.costs import Costs
from holdfast_lab.simulate.failures import Down

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
            msg = f"update eager needs a model that every worker has all of, got model {self.model}: use update lazy"
            raise ConfigError(msg)
        check_range("save_every", self.save_every, 0, most=10**9)
        for name, most in _MOST.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, most=most)
        if self.horizon_s is not None:
            check_range("horizon_s", self.horizon_s, 0, above=True, most=LONGEST_S)
        if self.steps is None and self.horizon_s is None:
            msg = "a job needs steps, horizon_s, or both: otherwise it never ends"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides what comes out, but the seed.

    Args:
        cluster: The machines.
        job: What runs on them.
        costs: What everything takes.
        failures: Who is down and when: :class:`~holdfast_lab.simulate.Failures` or :class:`~holdfast_lab.simulate.Trace`.

    Raises:
        ConfigError: if the parts do not go together.
    """

    cluster: Cluster
    job: Job
    costs: Costs
    failures: Down

    def __post_init__(self) -> None:
        check_range("min_workers", self.job.min_workers, 1, most=self.cluster.total)
        check_range("start_workers", self.quorum, 1, most=self.cluster.total)
        if self.job.start_workers is not None and self.job.start_workers < self.job.min_workers:
            msg = f"start_workers must be at least min_workers, {self.job.min_workers}, got {self.job.start_workers}"
            raise ConfigError(msg)
        if not self.full_step_s > 0:
            msg = "a step must take some time: give slice_s, sum_s or steps_s of the costs"
            raise ConfigError(msg)

    @property
    def slices(self) -> int:
        """Pieces of a mini-batch."""
        return self.job.slices or self.cluster.workers

    @property
    def quorum(self) -> int:
        """How many workers must be there for the job to be started."""
        usual = self.cluster.workers if self.job.strategy == "relaunch" else self.job.min_workers
        return self.job.start_workers or usual

    @property
    def full_step_s(self) -> float:
        """What a step takes when everybody is there, seconds."""
        compute, sums = self.costs.step_parts_s(self)
        return float(compute[-1] + sums[-1] + self.costs.exposed_s(self)[-1])

    @property
    def horizon_s(self) -> float:
        """When the simulation stops looking, seconds."""
        if self.job.horizon_s is not None:
            return self.job.horizon_s
        assert self.job.steps is not None
        saves = self.job.steps // self.job.save_every if self.job.save_every else 0
        return min(10 * (self.job.steps * self.full_step_s + saves * self.costs.save_s), LONGEST_S)

    def save_steps(self, interval_s: float) -> int:
        """Return how many steps lie between two checkpoints that are ``interval_s`` of undisturbed work apart, at least 1."""
        return max(1, round(min(interval_s, LONGEST_S) / self.full_step_s)) if math.isfinite(interval_s) else 0
