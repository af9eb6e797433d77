"""Tests of frameworks; ``make integrations`` runs them in an environment that has these."""

import importlib.util

import pytest

from holdfast.session.session import forget_sessions


@pytest.fixture(autouse=True)
def framework(request):
    """Skip tests whose module names frameworks in ``NEEDS`` that are not installed here."""
    missing = [name for name in getattr(request.module, "NEEDS", ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: run make integrations")


@pytest.fixture(autouse=True)
def _no_open_session():
    yield
    forget_sessions()
