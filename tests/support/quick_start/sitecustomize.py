"""Imported by Python at the start of every process of a test: jobs that compile nothing do not load torch's compiler.

The first optimizer of a process imports ``torch._dynamo``, to exclude itself from compilation. That import is half of a
worker's computation before its first step. Here a module takes its place that has ``graph_break`` and ``disable``, and
that is replaced by the real one on any other access. The examples, the demo and the benchmarks run without it.
"""

import gc
import importlib
import importlib.abc
import importlib.util
import sys
import types

_NAME = "torch._dynamo"


class _NoCompiler(types.ModuleType):
    """Replaces ``torch._dynamo`` as long as nothing is compiled."""

    def graph_break(self, msg=""):
        """Do nothing, as without a compiler."""

    def disable(self, fn=None, recursive=True, **options):
        """Return ``fn`` unchanged."""
        return fn

    def __getattr__(self, name):
        if name in ("__spec__", "__file__", "__wrapped__"):  # looked up by inspect in all modules
            raise AttributeError(name)
        if sys.modules[_NAME] is self:
            del sys.modules[_NAME]
            sys.modules["torch"].__dict__.pop("_dynamo", None)
            importlib.import_module(_NAME)
        return getattr(sys.modules[_NAME], name)


class _Loaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the parts of the compiler that were loaded while the replacement gave way."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(_NAME + ".") and name in sys.modules:
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        """Do nothing: the module was executed already."""


sys.modules[_NAME] = _NoCompiler(_NAME)
sys.meta_path.insert(0, _Loaded())
gc.set_threshold(20_000, 20, 20)  # importing torch makes a million objects and no garbage
