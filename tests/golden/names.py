"""In the tree under test: the public names with their signatures, what importing them loads, and the settings with their defaults."""

import dataclasses
import importlib
import inspect
import json
import re
import sys

import holdfast

LOADED = {name: any(m == name or m.startswith(f"{name}.") for m in sys.modules) for name in ("torch", "numpy", "typer")}
"""What was loaded with it."""


def described(thing):
    """Return the signature of a thing, of its public methods and properties, and what a class is derived from."""
    if isinstance(thing, dict):
        return sorted(thing)
    if not callable(thing):
        return repr(thing)
    made = {"signature": signature(thing)}
    if inspect.isclass(thing):
        made["bases"] = [base.__name__ for base in thing.__mro__[1:]]
        members = ((name, inspect.getattr_static(thing, name)) for name in dir(thing) if not name.startswith("_"))
        made["members"] = {name: kind(member) for name, member in members}
    return made


def kind(member):
    """Say what a member of a class is."""
    if isinstance(member, property):
        return "property"
    member = getattr(member, "__func__", member)
    return signature(member) if callable(member) else type(member).__name__


def signature(thing):
    """Return names, order and defaults of parameters, without annotations, which name classes that may move."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return re.sub(r" at 0x[0-9a-f]+|<[^>]*>", "", str(inspect.Signature(bare)))


checkpoint = importlib.import_module("holdfast.checkpoint")  # which loads more
settings = {field.name: repr(field.default) for field in dataclasses.fields(holdfast.Settings)}
names = {name: described(getattr(holdfast, name)) for name in sorted(holdfast.__all__)}
saved = {name: described(getattr(checkpoint, name)) for name in sorted(checkpoint.__all__)}
print(
    json.dumps({"holdfast": names, "holdfast.checkpoint": saved, "settings": settings, "import holdfast loads": LOADED})
)
