"""For the tests of the laboratory."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _plain_histories():
    """The simulator does not compile itself: that takes longer than all that tests simulate."""
    from holdfast_lab.simulate import compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "PLAIN_OUTAGES", 1 << 60)
        yield
