"""Group membership of a job, decided through a store that survives the workers.

:class:`~holdfast.membership.store.Store` is the interface: :class:`~holdfast.membership.client.HubStore` connects to
the launcher's :class:`~holdfast.membership.hub.Hub`, or to the one of several that leads;
:class:`~holdfast.membership.etcd.EtcdStore` connects to an etcd cluster.
:class:`~holdfast.membership.roster.Roster` builds uniform agreement on it, whichever worker fails. No torch.
"""

import time

from holdfast.errors import ConfigError, StoreLost
from holdfast.membership.acts import RosterVote
from holdfast.membership.client import HubStore
from holdfast.membership.etcd import EtcdStore
from holdfast.membership.hub import Hub
from holdfast.membership.roster import Agreement, Roster
from holdfast.membership.store import LEASE_S, Store

__all__ = ["Agreement", "Hub", "HubStore", "Roster", "RosterVote", "Store", "open_store"]


_RETRY_S = 0.1


def open_store(url: str, token: str, *, lease_s: float = LEASE_S, patience_s: float = 0.0) -> Store:
    """Return the store at ``url``.

    Args:
        url: ``holdfast://HOST:PORT[,HOST:PORT...]/JOB`` for the hubs of launchers, or ``etcd://[USER@]HOST:PORT[,HOST:PORT...]/JOB``.
        token: Token of the hub, or password of the etcd user.
        lease_s: Duration of leases in etcd; a hub determines its own.
        patience_s: Try again for this long if the store cannot be reached: when all workers of a large job connect at
            once, it may turn some of them away.

    Raises:
        ConfigError: if the URL has another form, or the store refuses the token.
        StoreLost: if the store cannot be reached.
    """
    ends_s = time.monotonic() + patience_s
    while True:
        try:
            return _open(url, token, lease_s)
        except StoreLost:
            if time.monotonic() > ends_s:
                raise
        time.sleep(_RETRY_S)


def _open(url: str, token: str, lease_s: float) -> Store:
    kind, _, rest = url.partition("://")
    where, _, job = rest.partition("/")
    if kind == "holdfast":
        return HubStore(where, token, job)
    if kind == "etcd":
        return EtcdStore(where, token, job, lease_s=lease_s)
    raise ConfigError(
        f"the store must be holdfast://HOST:PORT[,HOST:PORT...]/JOB or etcd://HOST:PORT[,HOST:PORT...]/JOB, got {url!r}"
    )
