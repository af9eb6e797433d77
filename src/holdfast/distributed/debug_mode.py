"""Whether ranks compare the collectives that they call."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast.options import parse


def debug_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Return whether ``HOLDFAST_DEBUG`` asks that ranks compare the collectives that they call, before each.

    Raises:
        ConfigError: if it is neither 0 nor 1.
    """
    text = (os.environ if env is None else env).get("HOLDFAST_DEBUG", "")
    return bool(parse("HOLDFAST_DEBUG", text, default=False))
