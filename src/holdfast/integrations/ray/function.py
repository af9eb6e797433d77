"""How a function reaches the workers: Ray's cloudpickle packs it, and in each worker Ray's cloudpickle unpacks it.

The packed function is an argument of Ray's tasks, as every function that Ray runs is. On each node it lies in a file
that only its owner can read, for as long as the job runs. A worker unpacks it only if it has the digest that the driver
took of it. A module that the function imports is not packed: it must be on the node.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.base.temporary import TemporaryFolder
from holdfast.errors import ConfigError

MODULE = "holdfast.integrations.ray.train_fn"
"""What the workers run: it calls the function."""
_FILE, _DIGEST = "HOLDFAST_RAY_FUNCTION", "HOLDFAST_RAY_FUNCTION_SHA256"


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A function without arguments, packed by Ray's cloudpickle, and the sha256 of that."""

    data: bytes
    sha256: str


def pack(train_fn: Callable[..., Any], config: Mapping[str, Any] | None) -> PackedFunction:
    """Return ``train_fn``, packed together with its configuration, its only argument if it takes one.

    Raises:
        ConfigError: if it takes other arguments, or cannot be packed.
    """
    from ray import cloudpickle

    call = bind(train_fn, config)
    try:
        data: bytes = cloudpickle.dumps(call)
    except Exception as error:  # cloudpickle raises whatever an object of the function raises
        raise ConfigError(
            f"{_name(train_fn)} cannot be sent to other processes: {error!s:.200}; create such objects inside of it"
        ) from error
    return PackedFunction(data, hashlib.sha256(data).hexdigest())


def bind(train_fn: Callable[..., Any], config: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Return ``train_fn`` as a function without arguments; its only argument, if it needs one, is ``config``.

    Raises:
        ConfigError: if it needs other arguments, or there is a configuration that it does not take.
    """
    parameters = list(inspect.signature(train_fn).parameters.values())
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in optional]
    takes_one = bool(parameters) and parameters[0].kind not in (*optional, inspect.Parameter.KEYWORD_ONLY)
    if len(needed) > 1 or (needed and not takes_one) or (config is not None and not takes_one):
        raise ConfigError(
            f"{_name(train_fn)}{inspect.signature(train_fn)} must take no argument, or one: train_loop_config, a dict"
        )
    return functools.partial(train_fn, dict(config or {})) if needed or config is not None else train_fn


def _name(train_fn: Callable[..., Any]) -> str:
    return getattr(train_fn, "__name__", type(train_fn).__name__)


@contextlib.contextmanager
def kept_in_file(function: PackedFunction) -> Iterator[dict[str, str]]:
    """Keep the function in a file of this node, for its workers; yields the variables that say so."""
    folder = TemporaryFolder.make("holdfast-", Path(tempfile.gettempdir()))
    try:
        path = folder.path / "function"
        path.write_bytes(function.data)
        yield {_FILE: str(path), _DIGEST: function.sha256}
    finally:
        folder.remove()


def call_kept() -> None:
    """In a worker: unpack the function and call it.

    Raises:
        ConfigError: if the file is not the one that the driver packed.
    """
    data = Path(os.environ[_FILE]).read_bytes()
    if hashlib.sha256(data).hexdigest() != os.environ[_DIGEST]:
        raise ConfigError(f"{os.environ[_FILE]} is not the function that the driver packed: it was altered")

    from ray import cloudpickle

    cloudpickle.loads(data)()
