"""How survivors regroup after a failure: R1 to R4 of the recovery protocol, as one sequence.

::

    R1  revoke            every peer that waits in a collective wakes up
        agree(0)          returns when every survivor has heard; also answers the peers that wait in an agreement
    R2  shrink            a new communicator, of the survivors
        agree(1)          the fence: no worker revokes before every worker has left the shrink
    R3  share progress    how far every survivor is
    R4  agree(1)          from here all know the same, and all know that all know

What R3 shares depends on the driver: a training session shares sums (:mod:`holdfast.recovery.protocol`), the
``torch.distributed`` backend shares collectives. The sequence is the same, and the explorer checks it for both.

It is a table of lines and not a generator because the explorer copies and compares workers, which it can do with a line only.
"""

from __future__ import annotations

import enum

from holdfast.recovery.messages import Action, Agree, Progress, Revoke, ShareProgress, Shrink


class Line(enum.IntEnum):
    """One line of the sequence, in order. A worker enters at the first line that not every peer is known to be past.

    A failed collective enters at ``REVOKE``. A meeting that all peers know of enters at ``HEARD``: a peer that missed it is
    recovering, and comes to the same agreement. An agreement that said no has told every survivor, so it enters at
    ``SHRINK``. A newcomer's first line is ``FENCE``.
    """

    REVOKE = enum.auto()
    HEARD = enum.auto()
    SHRINK = enum.auto()
    FENCE = enum.auto()
    SHARE = enum.auto()
    CONFIRM = enum.auto()


def order_of(line: Line, progress: Progress) -> Action:
    """Return what a worker that is as far as ``progress`` does at ``line``."""
    match line:
        case Line.REVOKE:
            return Revoke()
        case Line.HEARD:
            return Agree(flag=False)
        case Line.SHRINK:
            return Shrink()
        case Line.FENCE | Line.CONFIRM:
            return Agree(flag=True)
        case Line.SHARE:
            return ShareProgress(progress)


def line_after(line: Line, *, succeeded: bool) -> Line | None:
    """Return the line that follows, None after the last one: the survivors have regrouped.

    Args:
        line: The one that was carried out.
        succeeded: The agreement said yes, or the sharing of progress completed. The other lines cannot fail.
    """
    match line:
        case Line.SHARE if not succeeded:
            return Line.REVOKE  # only this worker knows: the others may still wait for it
        case Line.FENCE | Line.CONFIRM if not succeeded:
            return Line.SHRINK  # the agreement has told every survivor: a revoke would meet their shrink
        case Line.CONFIRM:
            return None
        case _:
            return Line(line + 1)
