"""Helpers for testing your own components.

``contract`` holds the checks that every :class:`~holdfast.comm.base.Communicator` must pass, ``counting`` a
communicator that counts messages.
"""
