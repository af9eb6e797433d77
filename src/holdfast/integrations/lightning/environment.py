"""The cluster environment that Lightning sees: each process alone."""

from __future__ import annotations

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment


class HoldfastEnvironment(ClusterEnvironment):
    """Each process is a world of its own to Lightning, because Holdfast distributes the work beneath it.

    The strategies set it themselves. It keeps Lightning from the environments that it would detect under
    ``holdfast run``: MPI, whose communicator belongs to Holdfast, Slurm and torchrun.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: ``holdfast run`` starts all processes."""
        return True

    @property
    def main_address(self) -> str:
        """An address that is never connected to."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """0: there is no port."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: only the strategies choose this environment."""
        return False

    def world_size(self) -> int:
        """Return 1."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Ignore the size, which stays 1."""

    def global_rank(self) -> int:
        """Return 0."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank, which stays 0."""

    def local_rank(self) -> int:
        """Return 0."""
        return 0

    def node_rank(self) -> int:
        """Return 0."""
        return 0
