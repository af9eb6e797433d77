"""Imported by Python at the start of every process of a test: jobs do without slow imports that few of them need.

- ``torch._dynamo``, the compiler: the first optimizer of a process imports it, to exclude itself from compilation. Here a
  module takes its place that has ``graph_break`` and ``disable``.
- ``torch._meta_registrations``, a quarter of the import of torch: what most operations on meta and fake tensors return.
  It is loaded with the compiler, or with DTensor or FSDP, which compute with such tensors.
- ``sklearn``, which takes as long as torch, where only the digits are loaded from it, with all values as they are there.

The last two only where pytest or the campaign set PYTEST_CURRENT_TEST, so in what they start. Each is replaced by the real
one on any other use. The demo and the benchmarks run without this.
"""

import gc
import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder  # importlib.abc would take a third of the start of Python
from types import ModuleType, SimpleNamespace

_COMPILER = "torch._dynamo"
_META = "torch._meta_registrations"
_NEED_META = ("torch.distributed.tensor", "torch.distributed.fsdp")
_DIGITS = ("sklearn", "sklearn.datasets")


class _Replacement(ModuleType):
    """Takes the place of a module as long as nothing but its own attributes is used."""

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":  # looked up in all modules, by their import and by inspect
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


class _Datasets(_Replacement):
    """Replaces ``sklearn.datasets`` as long as nothing but the digits is loaded."""

    def load_digits(self, *, return_X_y=False):  # noqa: N803 - its name there
        """Return the digits that scikit-learn has, as it does."""
        import numpy as np

        file = os.path.join(sys.modules["sklearn"].__path__[0], "datasets", "data", "digits.csv.gz")
        table = np.loadtxt(file, delimiter=",")
        data, target = table[:, :-1], table[:, -1].astype(int)
        if return_X_y:
            return data, target
        return SimpleNamespace(data=data, target=target, images=data.reshape(-1, 8, 8))


def _real(name):
    """Put the module itself in the place of its replacement, and return it; None if it is not imported yet."""
    if isinstance(sys.modules.get(name), _Replacement):
        for each in _DIGITS if name in _DIGITS else (name,):
            if isinstance(sys.modules.get(each), _Replacement):
                del sys.modules[each]
        if name == _COMPILER:
            _real(_META)
        if name.startswith("torch."):
            sys.modules["torch"].__dict__.pop(name.removeprefix("torch."), None)
        importlib.import_module(name)
    return sys.modules.get(name)


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
    """Sees each first import of a module; loads a replacement of those in ``replaced``, each once."""

    def __init__(self, replaced):
        self.replaced = {*replaced}

    def find_spec(self, name, path=None, target=None):
        if name in _NEED_META:
            _real(_META)
        if name.startswith("sklearn.") and name not in _DIGITS:
            _real("sklearn")
        is_loaded = name.startswith(_COMPILER + ".") and name in sys.modules  # while the replacement gave way
        if not is_loaded and name not in self.replaced:
            return None
        spec = ModuleSpec(name, self)
        if name == "sklearn":
            found = PathFinder.find_spec(name)
            if found is None:
                return None
            spec.origin, spec.submodule_search_locations = found.origin, found.submodule_search_locations
        return spec

    def create_module(self, spec):
        if spec.name not in self.replaced:
            return sys.modules[spec.name]
        self.replaced.remove(spec.name)
        return (_Datasets if spec.name == "sklearn.datasets" else _Replacement)(spec.name)

    def exec_module(self, module):
        if module.__name__ == _META:
            _allow_generators()


sys.modules[_COMPILER] = _NoCompiler(_COMPILER)
sys.meta_path.insert(0, _Finder((_META, *_DIGITS) if "PYTEST_CURRENT_TEST" in os.environ else ()))
gc.set_threshold(20_000, 20, 20)  # importing torch makes a million objects and no garbage
