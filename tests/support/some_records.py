"""Records of which a test names what matters; all other fields are empty."""

from dataclasses import MISSING, fields

EMPTY = {"int": 0, "float": 0.0, "str": "", "bool": False, "tuple": (), "Mapping": {}, "dict": {}}


def some(kind, /, **named):
    """A record of this kind, by default of rank 0 at the beginning."""
    needed = [each for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    empty = {each.name: EMPTY.get(str(each.type).split("[")[0]) for each in needed}
    return kind(**{"t_s": 0.0, "rank": 0, "step": 0} | empty | named)
