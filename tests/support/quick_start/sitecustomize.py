"""Imported by Python at the start of every process of a test: jobs do without two slow parts of torch that few need.

- ``torch._dynamo``, the compiler: the first optimizer of a process imports it, to exclude itself from compilation. Here a
  module takes its place that has ``graph_break`` and ``disable``.
- ``torch._meta_registrations``, a quarter of the import of torch: what most operations on meta and fake tensors return.
  Where pytest or the campaign set PYTEST_CURRENT_TEST, so in what they start, it is loaded only with the compiler, or with
  DTensor or FSDP, which compute with such tensors.

Either is replaced by the real one on any other access. The examples, the demo and the benchmarks run without this.
"""

import gc
import importlib
import os
import sys
from importlib.machinery import ModuleSpec  # importlib.abc would take a third of the start of Python
from types import ModuleType

_COMPILER = "torch._dynamo"
_META = "torch._meta_registrations"
_NEED_META = ("torch.distributed.tensor", "torch.distributed.fsdp")


class _Replacement(ModuleType):
    """Takes the place of a module as long as nothing but its own attributes is used."""

    def __getattr__(self, name):
        if name.startswith("__"):  # looked up in all modules, by their import and by inspect
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _NoCompiler(_Replacement):
    """Replaces ``torch._dynamo`` as long as nothing is compiled."""

    def __getattr__(self, name):
        return _real(_COMPILER).__path__ if name == "__path__" else super().__getattr__(name)

    def graph_break(self, msg=""):
        """Do nothing, as without a compiler."""

    def disable(self, fn=None, recursive=True, **options):
        """Return ``fn`` unchanged."""
        return fn


def _real(name):
    """Put the module itself in the place of its replacement, and return it."""
    if isinstance(sys.modules.get(name), _Replacement):
        del sys.modules[name]
        sys.modules["torch"].__dict__.pop(name.removeprefix("torch."), None)
        if name == _COMPILER:
            _real(_META)
        importlib.import_module(name)
    return sys.modules[name]


def _allow_generators():
    """Do what the real module does by importing a module that imports a module that torch's generators need."""
    import torch._C

    if set_metaclass := getattr(torch._C, "_set_generator_metaclass", None):
        try:
            from torch._custom_class_base import CustomClassBaseMeta as Meta
        except ModuleNotFoundError:  # before torch 2.14
            from torch._opaque_base import OpaqueBaseMeta as Meta
        set_metaclass(Meta)


class _Finder:
    """Sees each first import of a module; loads a replacement of those in ``replaced``."""

    def __init__(self, replaced):
        self.replaced = replaced

    def find_spec(self, name, path=None, target=None):
        if name in _NEED_META:
            _real(_META)
        is_loaded = name.startswith(_COMPILER + ".") and name in sys.modules  # while the replacement gave way
        return ModuleSpec(name, self) if is_loaded or name in self.replaced else None

    def create_module(self, spec):
        if spec.name not in self.replaced:
            return sys.modules[spec.name]
        self.replaced.remove(spec.name)
        return _Replacement(spec.name)

    def exec_module(self, module):
        if isinstance(module, _Replacement):
            _allow_generators()


sys.modules[_COMPILER] = _NoCompiler(_COMPILER)
sys.meta_path.insert(0, _Finder({_META} if "PYTEST_CURRENT_TEST" in os.environ else set()))
gc.set_threshold(20_000, 20, 20)  # importing torch makes a million objects and no garbage
