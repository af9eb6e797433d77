"""A scenario: the machines, and the job that runs on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, check_range
from holdfast_lab.simulate.cluster import Cluster
from holdfast_lab.simulate.costs import STALE_SHARE, Costs
from holdfast_lab.simulate.failures import Down
from holdfast_lab.simulate.job import SimulatedJob
from holdfast_lab.simulate.price_table import exposed_s, step_parts_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of a simulation except the seed.

    Args:
        cluster: The machines.
        job: The job that runs on them.
        costs: The duration of every operation.
        failures: The outages: :class:`~holdfast_lab.simulate.Failures` or :class:`~holdfast_lab.simulate.FailureTrace`.

    Raises:
        ConfigError: if the parts are inconsistent.
    """

    cluster: Cluster
    job: SimulatedJob
    costs: Costs
    failures: Down

    def __post_init__(self) -> None:
        check_range("min_workers", self.job.min_workers, 1, most=self.cluster.total)
        check_range("start_workers", self.quorum, 1, most=self.cluster.total)
        if self.job.start_workers is not None and self.job.start_workers < self.job.min_workers:
            raise ConfigError(
                f"start_workers must be at least min_workers, {self.job.min_workers}, got {self.job.start_workers}"
            )
        if not self.full_step_s > 0:
            raise ConfigError("a step must take some time: give slice_s, sum_s or steps_s in the costs")

    @property
    def quorum(self) -> int:
        """Number of available workers needed to start the job."""
        usual = self.cluster.workers if self.job.strategy == "relaunch" else self.job.min_workers
        return self.job.start_workers or usual

    @property
    def full_step_s(self) -> float:
        """Duration of a step with all workers, seconds."""
        parts = self.cluster, self.job, self.costs
        compute, sums = step_parts_s(*parts)
        return float(compute[-1] + sums[-1] + exposed_s(*parts)[-1])

    @property
    def stale_iterations(self) -> float:
        """Further steps that each failure costs, because the lost part is restored as it was some steps ago."""
        if self.job.strategy != "partial" or self.job.model != "split":
            return 0.0
        stated = self.costs.stale_iterations
        return STALE_SHARE * self.job.mirror_every if stated is None else stated

    @property
    def horizon_s(self) -> float:
        """When the simulation ends, seconds."""
        if self.job.horizon_s is not None:
            return self.job.horizon_s
        assert self.job.steps is not None
        saves = self.job.steps // self.job.save_every if self.job.save_every else 0
        return min(10 * (self.job.steps * self.full_step_s + saves * self.costs.save_s), LONGEST_S)

    def save_steps(self, interval_s: float) -> int:
        """Return the number of steps, at least 1, between checkpoints ``interval_s`` of undisturbed work apart."""
        return max(1, round(min(interval_s, LONGEST_S) / self.full_step_s)) if math.isfinite(interval_s) else 0
