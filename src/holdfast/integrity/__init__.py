"""Find silent corruption, and say whose it is: fingerprints of replicas, values far out of range, histories that do not reproduce.

Nothing here decides or sends anything: :mod:`holdfast.integrity.sdc_guard` brings what is found into the closing sum, and carries
out the policy. docs/guard.md says what is found, and what is not.
"""

from holdfast.integrity.fingerprint import RotatingDigest
from holdfast.integrity.plausible import Odd, find_odd
from holdfast.integrity.ranges import Finding, Ranges
from holdfast.integrity.recompute_check import Computed
from holdfast.integrity.snapshots import copied

__all__ = ["Computed", "Finding", "Odd", "Ranges", "RotatingDigest", "copied", "find_odd"]
