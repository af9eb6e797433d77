"""How members agree who have lost the store that they met in, as when the launcher dies, while all of them live.

The store may have gone in the very moment of an agreement, so that some have heard the outcome, and wait in the next sum,
while the others ask. Those must not be asked by another sum: the two would not fit each other. So each member, as soon as
it sees that the store is lost, tells each other which agreement it heard the outcome of last, and hears nothing from the
store any more. Who asks looks at what all have told: if one of them knows, its word holds, as the store's would have, and all
who ask see the same words. Else nobody has heard, nor will, and all will come to ask: each tells each other its flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.errors import InternalError
from holdfast.membership import Heard

Messages = Sequence[tuple[int, torch.Tensor]]
"""Each with the member that it comes from or goes to."""


class Alone:
    """One member's part in the agreements of a generation that has lost its store.

    Args:
        others: All other members.
        post: Begins to give a message to one of them.
        swap: Gives each of them a message, or none, and takes the next one of each; returns when both is done.
        heard: What the store has told last; it must tell nothing from now on.
    """

    def __init__(
        self,
        others: Sequence[int],
        post: Callable[[int, torch.Tensor], None],
        swap: Callable[[Messages, Messages], None],
        heard: Heard,
    ) -> None:
        self._others = others
        self._swap = swap
        self._known = heard
        self._has_asked = False
        for rank in others:
            post(rank, _message(heard))

    def agree(self, act: int, flag: bool) -> bool:
        """Return the outcome of an agreement that the store did not tell of; ``PeerFailed`` if a member does not answer."""
        if not self._has_asked:
            self._known = max([self._known, *self._listen([])])
            self._has_asked = True
        if self._known.act < act:
            mine = Heard(act, flag)
            # Given before this returns: who has the outcome may end, and nobody must miss it.
            flags = [mine, *self._listen([(rank, _message(mine)) for rank in self._others])]
            self._known = Heard(max(said.act for said in flags), all(said.value for said in flags))
        if self._known.act != act:
            raise InternalError(f"in agreement {act} somebody knew of agreement {self._known.act}")
        return self._known.value

    def _listen(self, given: Messages) -> list[Heard]:
        """Return the next word of each."""
        taken = [(rank, _message(Heard())) for rank in self._others]
        self._swap(given, taken)
        return [Heard(int(data[0]), bool(data[1])) for _, data in taken]


def _message(said: Heard) -> torch.Tensor:
    return torch.tensor([said.act, said.value], dtype=torch.int64)
