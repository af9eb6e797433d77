"""Rules between options: which values do not go together, and what to say then.

Bounds and choices of a single option are declared with it (:mod:`holdfast.base.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the values of some options.

    Args:
        fields: The options, by the names of their fields; the first one is at fault.
        is_broken: Returns whether values break the rule, given what has them.
        text: What to change, in which ``{it}`` stands for what has the values; or a function that returns it.
    """

    fields: tuple[str, ...]
    is_broken: Callable[[Any], object]
    text: str | Callable[[Any], str]

    def message(self, it: Any) -> str:
        """Return what to change, for values that break the rule."""
        return self.text.format(it=it) if isinstance(self.text, str) else self.text(it)


def check_rules(rules: Iterable[Rule], it: Any) -> None:
    """Raise a ConfigError for the first of the ``rules`` that ``it`` breaks."""
    for rule in rules:
        if rule.is_broken(it):
            raise ConfigError(rule.message(it))
