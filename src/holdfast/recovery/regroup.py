"""How survivors regroup after a failure: R1 to R4 of the recovery protocol, as one sequence.

::

    R1  revoke            every peer blocked in a collective wakes up
        agree(0)          returns when every survivor was notified; also answers peers that wait in an agreement
    R2  shrink            a new communicator, of the survivors
        agree(1)          the fence: no worker revokes before every worker has left the shrink
    R3  share progress    the progress of every survivor
    R4  agree(1)          from here on all have the same knowledge, and all know that all have it

The fence is for MPI, where a revoke may reach a peer that is still building the communicator. A membership store decides
a generation for all members at once (:attr:`Communicator.has_atomic_shrink`), so there the fence is passed without a
message. The model checker verifies the sequence with and without it.

R3 shares progress as the driver measures it: a training session counts all-reduces (:mod:`holdfast.recovery.protocol`),
the ``torch.distributed`` backend counts collectives. The model checker verifies the sequence for both.

It is a table of lines, not a generator, because the model checker must be able to copy and compare workers.
"""

from __future__ import annotations

import enum

from holdfast.recovery.messages import Action, Agree, Progress, Revoke, ShareProgress, Shrink


class RegroupLine(enum.IntEnum):
    """One line of the sequence, in order. A worker enters at the first line that some peer may not have passed yet.

    A failed collective enters at ``REVOKE``. A planned regrouping enters at ``HEARD``: a peer that missed it is
    recovering and reaches the same agreement. After an agreement that returned False every survivor knows, so it enters
    at ``SHRINK``. A newcomer's first line is ``FENCE``.
    """

    REVOKE = enum.auto()
    HEARD = enum.auto()
    SHRINK = enum.auto()
    FENCE = enum.auto()
    SHARE = enum.auto()
    CONFIRM = enum.auto()


def order_of(line: RegroupLine, progress: Progress) -> Action:
    """Return the action of a worker with this progress at ``line``."""
    match line:
        case RegroupLine.REVOKE:
            return Revoke()
        case RegroupLine.HEARD:
            return Agree(flag=False)
        case RegroupLine.SHRINK:
            return Shrink()
        case RegroupLine.FENCE:
            return Agree(flag=True, fences=True)
        case RegroupLine.CONFIRM:
            return Agree(flag=True)
        case RegroupLine.SHARE:
            return ShareProgress(progress)


def line_after(line: RegroupLine, *, succeeded: bool) -> RegroupLine | None:
    """Return the line that follows; None after the last one, when the survivors have regrouped.

    Args:
        line: The line that was carried out.
        succeeded: The agreement returned True, or sharing progress completed. The other lines cannot fail.
    """
    match line:
        case RegroupLine.SHARE if not succeeded:
            return RegroupLine.REVOKE  # only this worker knows: its peers may still wait for it
        case RegroupLine.FENCE | RegroupLine.CONFIRM if not succeeded:
            return (
                RegroupLine.SHRINK
            )  # every survivor knows from the agreement: a revoke would collide with their shrink
        case RegroupLine.CONFIRM:
            return None
        case _:
            return RegroupLine(line + 1)
