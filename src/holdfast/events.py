"""The old place of :mod:`holdfast.recovery.messages` and :mod:`holdfast.records.types`, whose names still answer here."""

from holdfast.records.encoding import *  # noqa: F403
from holdfast.records.types import *  # noqa: F403
from holdfast.recovery.messages import *  # noqa: F403
