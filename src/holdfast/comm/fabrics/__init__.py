"""Fabrics: how workers are started and communicate; one module each, see :mod:`~holdfast.comm.fabrics.registry`.

The launcher queries a fabric's capabilities, so nothing here imports torch before a worker connects.
"""
