"""``holdfast.reinit``: rebuild a script's application after a failure without restarting its process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from holdfast.data.seeds import generator_states, set_generator_states
from holdfast.engine.reinit_context import application
from holdfast.errors import ScriptError, Unwind
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

    The surviving processes keep running. Loops in ``main`` are left by an exception that ``except Exception`` does not
    catch. Then everything that ``main`` created is released, and the new session restores the state selected by
    ``--reinit-from`` before it yields a step. Random numbers drawn in ``main`` are the same each time. Other strategies
    only call ``main()``.

    Args:
        main: Builds everything that training needs, and trains. It should leave nothing behind in global variables.

    Returns:
        The return value of the last call of ``main``.

    Raises:
        ScriptError: if it is called inside itself, or ``main`` catches the exception.
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
        application.is_built_by_reinit, application.job = False, None


def _check_let_through() -> None:
    if application.job is not None:
        raise ScriptError(
            "main caught holdfast's Unwind and returned as if training had ended: let BaseException propagate, as"
            " `except Exception` does"
        )
