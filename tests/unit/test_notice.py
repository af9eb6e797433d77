"""SIGTERM: remembered until somebody can answer it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from holdfast.base import notice


@pytest.fixture(autouse=True)
def _handler_goes_back():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_notice_that_nobody_can_answer_is_kept_for_who_can():
    told = []
    notice.remember(lambda: False)

    send()
    assert told == []
    with notice.answered(lambda: told.append("first")):
        assert told == ["first"]
        send()
    send()  # between two loops
    with notice.answered(lambda: told.append("second")):
        pass

    assert told == ["first", "first", "second"]


def test_without_a_launcher_a_notice_outside_of_training_is_left_to_the_system():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    with notice.answered(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_thread_than_the_main_one_leaves_the_handler_alone():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def look():
        with notice.answered(lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert found == [before]


def run(code):
    text = f"import os, signal\nfrom holdfast.base import notice\n{code}"
    return subprocess.run([sys.executable, "-c", text], timeout=60, check=False).returncode


def test_a_loop_that_is_collected_within_the_next_one_leaves_its_notices_to_that_one():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    told = []
    abandoned = notice.answered(lambda: told.append("first"), lambda own: told.append("after the first"))
    abandoned.__enter__()

    with notice.answered(lambda: told.append("second"), lambda own: told.append("after the second")):
        abandoned.__exit__(None, None, None)
        send()
    send()

    assert told == ["second", "after the second"]
    with notice.answered(lambda: told.append("third")):
        pass
    assert told[2:] == ["third"]  # what came after the second
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_context_that_is_left_in_another_thread_is_left_without_an_error():
    """Where the garbage collector closes a loop that the script has abandoned."""
    before, errors = signal.getsignal(signal.SIGTERM), []
    context = notice.answered(lambda: None)
    context.__enter__()

    def leave():
        try:
            context.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, before)

    assert errors == []


def test_between_two_loops_a_notice_is_answered_before_the_handler_of_the_script():
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append("script"))

    for loop in ("first", "second"):
        with notice.answered(lambda loop=loop: told.append(loop), lambda has_own: told.append(has_own)):
            send()
        assert told == [loop]
        told.clear()
    send()

    assert told == [True, "script"]
    with notice.answered(lambda: told.append("third")):
        assert told == [True, "script", "third"], "the next loop has to know"
    send()
    assert told[3:] == ["script"]


def test_between_two_loops_without_such_a_handler_nothing_else_is_called():
    told = []
    notice.remember(lambda: False)
    with notice.answered(lambda: None, told.append):
        pass

    send()

    assert told == [False]


SEND = "os.kill(os.getpid(), signal.SIGTERM)"
FORK = """
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
os._exit(0 if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM else 1)
"""


@pytest.mark.parametrize(
    ("code", "end"),
    [
        pytest.param(f"notice.remember(lambda: True); {SEND}", -15, id="it may end at once"),
        pytest.param(f"notice.remember(lambda: False); {SEND}; notice.decline()", -15, id="nobody will answer, after"),
        pytest.param(f"notice.remember(lambda: False); notice.decline(); {SEND}", -15, id="nobody will answer, before"),
        pytest.param(f"notice.remember(lambda: False); {SEND}", 0, id="it is remembered"),
        pytest.param(
            f"notice.remember(lambda: True)\nwith notice.answered(print): pass\n{SEND}", 0, id="it was answered"
        ),
        pytest.param(f"notice.remember(lambda: False)\n{FORK}", 0, id="in a child it ends the child"),
    ],
)
def test_who_does_not_remember_a_notice_dies_of_it(code, end):
    assert run(code) == end
