"""Alias for :mod:`holdfast.recovery.messages` and :mod:`holdfast.records.types`, which used to be this module."""

from holdfast._lazy import lazy
from holdfast.records.encoding import *  # noqa: F403
from holdfast.records.types import *  # noqa: F403
from holdfast.recovery.messages import *  # noqa: F403
from holdfast.recovery.messages import RENAMED

__getattr__ = lazy(__name__, {}, RENAMED)
