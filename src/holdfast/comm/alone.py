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


class Alone:
    """One member's part in the agreements of a generation that has lost its store.

    Args:
        others: All other members.
        post: Begins to give a message to one of them.
        take: Waits for the next one from one of them.
        heard: What the store has told last; it must tell nothing from now on.
    """

    def __init__(
        self,
        others: Sequence[int],
        post: Callable[[int, torch.Tensor], None],
        take: Callable[[int, torch.Tensor], None],
        heard: Heard,
    ) -> None:
        self._others = others
        self._post = post
        self._take = take
        self._known = heard
        self._has_asked = False
        self._tell(heard)

    def agree(self, act: int, flag: bool) -> bool:
        """Return the outcome of an agreement that the store did not tell of.

        Raises:
            PeerFailed: if somebody does not answer.
        """
        if not self._has_asked:
            self._known = max([self._known, *self._listen()])
            self._has_asked = True
        if self._known.act < act:
            self._tell(Heard(act, flag))
            flags = [Heard(act, flag), *self._listen()]
            self._known = Heard(max(said.act for said in flags), all(said.value for said in flags))
        if self._known.act != act:
            msg = f"in agreement {act} somebody knew of agreement {self._known.act}"
            raise InternalError(msg)
        return self._known.value

    def _tell(self, said: Heard) -> None:
        for rank in self._others:
            self._post(rank, torch.tensor([said.act, said.value]))

    def _listen(self) -> list[Heard]:
        """Return the next word of each."""
        words = []
        for rank in self._others:
            data = torch.empty(2, dtype=torch.int64)
            self._take(rank, data)
            words.append(Heard(int(data[0]), bool(data[1])))
        return words
