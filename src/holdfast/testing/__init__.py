"""Helpers for testing your own parts.

``contract`` holds the checks that every :class:`~holdfast.comm.base.Communicator` passes, ``counting`` a communicator that counts
what is sent.
"""
