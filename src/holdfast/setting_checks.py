"""The rules of settings that depend on each other, or whose range has a hole."""

from __future__ import annotations

import math

from holdfast.base.orders import LISTED_ORDERS, UNITS, base_of
from holdfast.base.rules import Rule
from holdfast.recovery.registry import strategy_class
from holdfast.setting_choices import AUTO, ORDERS

_LONGEST_HANG_S = 1e9
"""The longest supported timeout of a thread's sleep."""
_SHORTEST_HANG_S = 0.1
"""A beacon pulses ten times a second: with a shorter limit, a worker would seem hung between two pulses."""
_SHORTEST_START_S = 1.0
"""Python alone takes a tenth of a second to start."""

RULES = (
    Rule(
        ("order",),
        lambda it: it.order not in ORDERS,
        f"order must be one of {', '.join((AUTO, *LISTED_ORDERS))} (N: a power of two, at most {UNITS[-1]}), got"
        " {it.order!r}",
    ),
    Rule(
        ("keep_last",),
        lambda it: it.keep_last < 0 or it.keep_last == 1,
        "keep_last must be at least 2, or 0 to keep all, got {it.keep_last}: the newest may be damaged",
    ),
    Rule(
        ("hang_timeout_s",),
        lambda it: it.hang_timeout_s != 0 and not _SHORTEST_HANG_S <= it.hang_timeout_s < math.inf,
        f"hang_timeout_s must be at least {_SHORTEST_HANG_S:g} seconds and finite, or 0 for never, got"
        " {it.hang_timeout_s:g}",
    ),
    Rule(
        ("hang_timeout_s",),
        lambda it: it.hang_timeout_s > _LONGEST_HANG_S,
        f"hang_timeout_s must be at most {_LONGEST_HANG_S:g} seconds, or 0 for never, got {{it.hang_timeout_s:g}}",
    ),
    Rule(
        ("start_timeout_s",),
        lambda it: it.start_timeout_s != 0 and not _SHORTEST_START_S <= it.start_timeout_s <= _LONGEST_HANG_S,
        f"start_timeout_s must be from {_SHORTEST_START_S:g} to {_LONGEST_HANG_S:g} seconds, or 0 for never, got"
        " {it.start_timeout_s:g}",
    ),
    Rule(
        ("mirror_fraction", "mirror_every"),
        lambda it: not 0 < it.mirror_fraction <= 1 or round(it.mirror_fraction * it.mirror_every) < 1,
        "mirror_fraction must be above 0, at most 1, and at least one step of mirror_every ({it.mirror_every}), got"
        " {it.mirror_fraction:g}",
    ),
    Rule(
        ("mirror_every", "strategy"),
        lambda it: it.mirror_every > 1 and not strategy_class(it.strategy).restores_parts,
        "mirror_every above 1 needs strategy partial, got {it.strategy}: an outdated copy cannot restore the same bits",
    ),
    Rule(
        ("between_hosts", "order"),
        lambda it: it.between_hosts == "nccl" and base_of(it.order) != "tree",
        "between_hosts nccl needs order tree, got {it.order}: only then do hosts exchange sums",
    ),
    Rule(
        ("wire", "order"),
        lambda it: it.wire == "bf16" and it.order.endswith("-wide"),
        "wire bf16 rounds float32 gradients, and order {it.order} is for those that have 16 bits: leave one out",
    ),
    Rule(
        ("guard_sums", "guard"),
        lambda it: it.guard_sums and it.guard == "off",
        "guard_sums needs guard stop, warn or heal, the response to a wrong checksum, got off",
    ),
    Rule(("mtbf_s",), lambda it: not it.mtbf_s > 0, "mtbf_s must be positive, got {it.mtbf_s}"),
    Rule(
        ("checkpoint_every", "checkpoint_auto"),
        lambda it: it.checkpoint_every and it.checkpoint_auto,
        "set either checkpoint_every (a fixed interval) or checkpoint_auto (the optimal interval), not both",
    ),
)
