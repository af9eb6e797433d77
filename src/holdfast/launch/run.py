"""What the parts of a launcher have in common."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.clock import Clock
from holdfast.launch.attempt import Files
from holdfast.launch.job import Job
from holdfast.launch.job_state import Judge
from holdfast.launch.live import View
from holdfast.launch.nodes import Nodes
from holdfast.launch.population import Births
from holdfast.launch.run_paths import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a job, over all its starts.

    ``nodes`` is None where the fabric needs no store. The clock's zero is when the run began, on the first node.
    """

    job: Job
    view: View
    judge: Judge
    births: Births
    nodes: Nodes | None
    places: Places
    files: Files
    clock: Clock

    @property
    def others(self) -> Nodes | None:
        """The launchers of the other nodes, None if there are none, or this node can take no part any more."""
        nodes = self.nodes
        return None if nodes is None or self.job.nnodes == 1 or nodes.store_lost else nodes
