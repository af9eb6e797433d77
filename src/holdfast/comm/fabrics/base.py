"""The base class of fabrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.comm.base import Communicator, MessageCommunicator


class EndNotes(Protocol):
    """What shows the end of a worker before its fabric does, such as :class:`~holdfast.records.life_lock.PeerLocks`."""

    def on_this_host(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose end it can show."""

    def core_of_end(self, rank: int) -> int | None:
        """Return None while a process goes on; the core on which it ends, as soon as it has begun to; -1 after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The arguments with which a worker process connects.

    Args:
        workers: Number of workers that the job starts with, where the launcher does not set it.
        ranks: Their ranks, ascending; None: 0, 1, 2, ...
        rank: This worker's rank, if the launcher sets it, as ``gloo`` requires; -1 if not.
        store: URL of the membership store, which ``gloo`` requires; "" if there is none.
        token: Access token of the store.
        end_notes: Says whether and where workers of this host end. A fabric may use it to detect failures earlier. None:
            nothing is known.
        run_dir: Folder of the run, which all hosts share; "" if there is none. A fabric may use it to make sure that of two
            groups of workers that have lost contact one continues.
    """

    workers: int = 0
    ranks: Sequence[int] | None = None
    rank: int = -1
    store: str = ""
    token: str = ""
    end_notes: EndNotes | None = None
    run_dir: str = ""


class Fabric(ABC):
    """How the workers of a job are started and how they communicate.

    A fabric declares its capabilities below. No other code compares names of fabrics.
    """

    name: ClassVar[str]
    """Value of ``--fabric``."""
    one_process: ClassVar[bool] = False
    """One process runs all workers, so none of them can be killed, hang or be slow individually."""
    starts_each: ClassVar[bool] = False
    """The launcher starts each worker itself and hosts a membership store; otherwise one command starts all workers."""
    can_join: ClassVar[bool] = False
    """Workers can join and leave a running job."""
    survives_node_loss: ClassVar[bool] = False
    """A job on several nodes continues when one is lost; each node has a launcher of its own."""
    spans_hosts: ClassVar[bool] = False
    """One launcher can start workers on several nodes (``--hosts``)."""
    connecting: ClassVar[str] = "the rendezvous of the workers"
    """What workers wait in until all of them are connected, in words."""
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """Types of devices that models can be on. The communicator itself only ever gets tensors in host memory."""

    @property
    def has_parent_process(self) -> bool:
        """Whether the launch command is a process of its own, such as mpirun, that starts all workers."""
        return not self.starts_each and not self.one_process

    def check_installed(self) -> None:  # noqa: B027 - most fabrics need nothing
        """Check that this machine has what the fabric needs.

        Raises:
            ConfigError: if not; the message says what to install.
        """

    def launch_command(self, workers: int, hosts: Sequence[str] | None = None) -> list[str]:
        """Return the command prefix that starts ``workers`` processes of the program that is appended to it.

        ``hosts`` are arguments that select the machines; None: this machine.
        """
        return []

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Communicator:
        """Return the communicator of this process.

        Raises:
            ConfigError: if the fabric cannot work here.
        """

    def connect_messages(self, endpoint: Endpoint) -> MessageCommunicator:
        """Return the communicator of this process for the ``torch.distributed`` backend.

        Raises:
            ConfigError: if the fabric has none, or cannot work here.
        """
        raise ConfigError(
            f"the torch.distributed backend does not work over the fabric {self.name}, it needs a process for each rank:"
            " start with `holdfast run -n 4 SCRIPT` or `holdfast run --fabric gloo -n 4 SCRIPT`"
        )
