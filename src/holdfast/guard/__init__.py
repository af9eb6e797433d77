"""Find silent corruption, and say whose it is: fingerprints of replicas, values far out of range, histories that do not reproduce.

Nothing here decides or sends anything: :mod:`holdfast.train.watch` brings what is found into the closing sum, and carries
out the policy. docs/guard.md says what is found, and what is not.
"""

from holdfast.guard.computed import Computed
from holdfast.guard.fingerprint import RotatingDigest
from holdfast.guard.plausible import Odd, find_odd
from holdfast.guard.ranges import Finding, Ranges
from holdfast.guard.snapshots import copied

__all__ = ["Computed", "Finding", "Odd", "Ranges", "RotatingDigest", "copied", "find_odd"]
