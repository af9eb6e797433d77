"""Two records: every difference in one line."""

import json

_MOST_LETTERS = 160


def differences(old, new, where=""):
    """Yield a line for each value that only one of two records has, or that is another in each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            place = f"{where}/{name}" if where else name
            if name not in new:
                yield f"{place}: missing, was {_shown(old[name])}"
            elif name not in old:
                yield f"{place}: additional, {_shown(new[name])}"
            else:
                yield from differences(old[name], new[name], place)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_lists(old, new, where)
    elif type(old) is not type(new) or old != new:
        yield f"{where}: {_shown(old)} -> {_shown(new)}"


def _of_lists(old, new, where):
    """Yield the first difference of two lists alone: what follows in a run differs, too."""
    for number, (a, b) in enumerate(zip(old, new, strict=False)):
        if lines := list(differences(a, b, f"{where}[{number}]")):
            yield from lines
            return
    if len(old) != len(new):
        yield f"{where}: {len(old)} entries -> {len(new)}"


def _shown(value):
    text = json.dumps(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 4]} ..."
