"""Who belongs to the job, decided through a store that no worker hosts.

:class:`~holdfast.membership.store.Store` is the seam: :class:`~holdfast.membership.client.HubStore` talks to the launcher's
:class:`~holdfast.membership.hub.Hub`, :class:`~holdfast.membership.etcd.EtcdStore` to a cluster.
:class:`~holdfast.membership.roster.Roster` makes agreements of it that are uniform, whichever worker dies. No torch.
"""

from holdfast.errors import ConfigError
from holdfast.membership.client import HubStore
from holdfast.membership.etcd import EtcdStore
from holdfast.membership.hub import Hub
from holdfast.membership.roster import Heard, Roster, Vote
from holdfast.membership.store import LEASE_S, Store

__all__ = ["Heard", "Hub", "HubStore", "Roster", "Store", "Vote", "open_store"]


def open_store(url: str, token: str, *, lease_s: float = LEASE_S) -> Store:
    """Return the store at ``url``.

    Args:
        url: ``holdfast://HOST:PORT/JOB``, as the launcher's hub has it, or ``etcd://[USER@]HOST:PORT[,HOST:PORT...]/JOB``.
        token: What the hub asks for; the password of etcd's user.
        lease_s: Of what is leased in etcd; a hub says it itself.

    Raises:
        ConfigError: if there is no such kind of store, or it refuses us.
        StoreLost: if it cannot be reached.
    """
    kind, _, rest = url.partition("://")
    where, _, job = rest.partition("/")
    if kind == "holdfast":
        return HubStore(where, token, job)
    if kind == "etcd":
        return EtcdStore(where, token, job, lease_s=lease_s)
    raise ConfigError(f"the store must be holdfast://HOST:PORT/JOB or etcd://HOST:PORT[,HOST:PORT...]/JOB, got {url!r}")
