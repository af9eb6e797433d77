"""What a fabric is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a worker's process knows when it connects.

    Args:
        workers: How many the job begins with.
        ranks: Their numbers, ascending; None: 0, 1, 2, ...
        rank: This worker's number, where the launcher says it; -1: it does not.
        store: URL of the store of members; "" if there is none.
        token: What the store asks for.
    """

    workers: int
    ranks: Sequence[int] | None = None
    rank: int = -1
    store: str = ""
    token: str = ""


class Fabric(ABC):
    """How the workers of a job are started and how they communicate.

    What a fabric can do it declares below. No other code compares names of fabrics.
    """

    name: ClassVar[str]
    """As ``--fabric`` takes it."""
    one_process: ClassVar[bool] = False
    """One process plays all workers, so none of them can be killed, be stuck or be slow by itself."""
    starts_each: ClassVar[bool] = False
    """The launcher starts each worker by itself and keeps a store of members; otherwise one command starts them all."""
    can_join: ClassVar[bool] = False
    """Workers can join and leave a job that runs."""
    survives_node_loss: ClassVar[bool] = False
    """A job on several machines continues when one is lost; each machine has a launcher of its own."""
    spans_hosts: ClassVar[bool] = False
    """One launcher can start workers on several machines (``--hosts``)."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """Types of devices that models can be on."""

    @property
    def has_parent_process(self) -> bool:
        """Whether the launch command is a process of its own, such as mpirun, that starts all workers."""
        return not self.starts_each and not self.one_process

    def check_installed(self) -> None:  # noqa: B027 - most fabrics need nothing
        """Make sure that this machine has what the fabric needs.

        Raises:
            ConfigError: if not; the message says what to install.
        """

    def launch_command(self, workers: int, hosts: Sequence[str] | None = None) -> list[str]:
        """Return the words that start ``workers`` processes of the program whose words follow.

        ``hosts`` are words that name the machines; None: this one.
        """
        return []

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of this process.

        Raises:
            ConfigError: if the fabric cannot work here.
        """
