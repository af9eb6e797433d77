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
        others: All other members.
        post: Starts to send a message to one member.
        sendrecv: Sends each of them a message, or none, and receives the next one from each; blocks until both are done.
        heard: The last outcome that came from the store; it must deliver none from now on.
    """

    def __init__(
        self,
        others: Sequence[int],
        post: Callable[[int, torch.Tensor], None],
        sendrecv: Callable[[Messages, Messages], None],
        heard: Agreement,
    ) -> None:
        self._others = others
        self._sendrecv = sendrecv
        self._known = heard
        self._has_asked = False
        for rank in others:
            post(rank, _message(heard))

    def agree(self, act: int, flag: bool) -> bool:
        """Return the outcome of an agreement that the store did not deliver; ``PeerFailed`` if a member is silent."""
        if not self._has_asked:
            self._known = max([self._known, *self._listen([])])
            self._has_asked = True
        if self._known.act < act:
            mine = Agreement(act, flag)
            # Sent before this returns: a member may exit once it has the outcome, and all others need its flag.
            flags = [mine, *self._listen([(rank, _message(mine)) for rank in self._others])]
            self._known = Agreement(max(said.act for said in flags), all(said.value for said in flags))
        if self._known.act != act:
            raise InternalError(f"agreement {act}: a member reports the outcome of agreement {self._known.act}")
        return self._known.value

    def _listen(self, given: Messages) -> list[Agreement]:
        """Return the next message from each of the other members."""
        taken = [(rank, _message(Agreement())) for rank in self._others]
        self._sendrecv(given, taken)
        return [Agreement(int(data[0]), bool(data[1])) for _, data in taken]


def _message(said: Agreement) -> torch.Tensor:
    return torch.tensor([said.act, said.value], dtype=torch.int64)
