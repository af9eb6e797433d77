"""Agreement between members that have lost their store, for instance because the launcher died, while all are alive.

The store may be lost in the middle of an agreement: some members know the outcome and wait in the next collective,
while others do not. A collective cannot ask the former, because it would not match the one that they wait in. So each
member that sees the loss posts to every other member the last agreement whose outcome it knows, and ignores the store
from then on. A member without the outcome reads these messages. If one of them has the outcome, it holds, as the
store's would have, and every member that asks reads the same messages. Otherwise all exchange their flags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.errors import InternalError
from holdfast.membership import Agreement

Messages = Sequence[tuple[int, torch.Tensor]]
"""Each with the member that sends or receives it."""


class StorelessAgreement:
    """One member's part in the agreements of a generation that has lost its store.

    Args:
        peers: All other members.
        post: Starts to send a message to one member.
        sendrecv: Sends each of them a message, or none, and receives the next one from each; blocks until both are done.
        outcome: The last outcome that came from the store; it must deliver none from now on.
    """

    def __init__(
        self,
        peers: Sequence[int],
        post: Callable[[int, torch.Tensor], None],
        sendrecv: Callable[[Messages, Messages], None],
        outcome: Agreement,
    ) -> None:
        self._peers = peers
        self._sendrecv = sendrecv
        self._outcome = outcome
        self._has_asked = False
        for rank in peers:
            post(rank, _message(outcome))

    def agree(self, act: int, flag: bool) -> bool:
        """Return the outcome of an agreement that the store did not deliver; ``PeerFailed`` if a member is silent."""
        if not self._has_asked:
            self._outcome = max([self._outcome, *self._listen([])])
            self._has_asked = True
        if self._outcome.act < act:
            own_vote = Agreement(act, flag)
            # Sent before this returns: a member may exit once it has the outcome, and all others need its flag.
            flags = [own_vote, *self._listen([(rank, _message(own_vote)) for rank in self._peers])]
            self._outcome = Agreement(max(vote.act for vote in flags), all(vote.value for vote in flags))
        if self._outcome.act != act:
            raise InternalError(f"agreement {act}: a member reports the outcome of agreement {self._outcome.act}")
        return self._outcome.value

    def _listen(self, outbox: Messages) -> list[Agreement]:
        """Return the next message from each of the other members."""
        inbox = [(rank, _message(Agreement())) for rank in self._peers]
        self._sendrecv(outbox, inbox)
        return [Agreement(int(data[0]), bool(data[1])) for _, data in inbox]


def _message(agreement: Agreement) -> torch.Tensor:
    return torch.tensor([agreement.act, agreement.value], dtype=torch.int64)
