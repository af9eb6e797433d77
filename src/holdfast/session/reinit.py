"""What a script calls so that its application can be built again while its process goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from holdfast.data.seeds import generator_states, set_generator_states
from holdfast.errors import ScriptError, Unwind
from holdfast.session.reinit_context import application
from holdfast.session.session import forget_sessions

T = TypeVar("T")


def reinit(main: Callable[[], T]) -> T:
    """Call ``main``, and under ``--strategy reinit`` call it again after each failure (MPI's Reinit proposal).

    ::

        def main():
            model = make_model()
            session = holdfast.Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in session.steps(dataset, batch_size=128, epochs=3):
                ...

        holdfast.reinit(main)

    The processes of the survivors go on. Loops in ``main`` are left by an exception that ``except Exception`` lets
    through; then all that ``main`` made is let go, and the new session has the state that ``--reinit-from`` says before it
    yields a step. Whatever draws random numbers in ``main`` draws the same ones each time. Under any other strategy this
    is ``main()``.

    Args:
        main: Builds everything that training needs, and trains. It should leave nothing behind in global variables.

    Returns:
        What the last ``main`` returned.

    Raises:
        ScriptError: if it is called inside itself, or ``main`` does not let the exception through.
    """
    if application.is_built_by_reinit:
        raise ScriptError("holdfast.reinit was called inside holdfast.reinit: call it once, around the whole script")
    generators = generator_states()
    application.is_built_by_reinit = True
    try:
        while True:
            application.has_session = False
            try:
                result = main()
            except Unwind:
                forget_sessions()
            else:
                _check_let_through()
                return result
            gc.collect()  # models and optimizers refer to each other
            set_generator_states(generators)
    finally:
        application.is_built_by_reinit, application.world = False, None


def _check_let_through() -> None:
    if application.world is not None:
        raise ScriptError(
            "main caught holdfast's Unwind and ended as if training were over: let BaseException through, as `except Exception` does"
        )
