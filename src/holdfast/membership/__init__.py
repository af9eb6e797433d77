"""Who belongs to the job, decided through a store that no worker hosts.

:class:`~holdfast.membership.store.Store` is the seam: :class:`~holdfast.membership.client.HubStore` talks to the launcher's
:class:`~holdfast.membership.hub.Hub`. :class:`~holdfast.membership.roster.Roster` makes agreements of it that are uniform,
whoever dies. No torch.
"""

from holdfast.membership.client import HubStore
from holdfast.membership.hub import Hub
from holdfast.membership.opening import open_store
from holdfast.membership.roster import Heard, Roster, Vote
from holdfast.membership.store import Store

__all__ = ["Heard", "Hub", "HubStore", "Roster", "Store", "Vote", "open_store"]
