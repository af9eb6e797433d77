"""Signals in the middle of a function: what a handler writes must not be lost, wherever it runs."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any


def interruptions(function: FunctionType, handle: Callable[[], object]) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yield, for each instruction of ``function``, what calls something, and ``handle`` before that instruction, once."""
    for instruction in dis.get_instructions(function):

        def run(call: Callable[[], Any], offset: int = instruction.offset) -> Any:
            has_run = False

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal has_run
                if frame.f_code is not function.__code__:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode" and frame.f_lasti == offset and not has_run:
                    has_run = True
                    handle()
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                return call()
            finally:
                sys.settrace(before)

        yield run
