"""Tests of integrations are skipped where their framework is not installed."""

import pytest

from holdfast.session.session import forget_sessions


@pytest.fixture(autouse=True)
def _no_open_session():
    yield
    forget_sessions()
