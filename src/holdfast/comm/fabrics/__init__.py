"""Fabrics: how workers are started and how they communicate; one file each, and :mod:`~holdfast.comm.fabrics.registry` names them.

The launcher asks a fabric what it can do, so nothing here imports torch before a worker connects.
"""
