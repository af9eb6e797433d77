"""Helpers for testing your own parts: a communicator against its contract, a strategy against every interleaving.

``contract`` holds the checks that every :class:`~holdfast.comm.base.Communicator` passes, ``counting`` a communicator
that counts what is sent, ``unordered`` a sum that keeps no order, ``explorer`` an explicit-state explorer of the commit protocol. The explorer searches the
states and moves of ``abstract_engine``; ``abstract_draft`` says what each move changes.
"""
