"""Tensor file formats of checkpoints: the interface, the core's own format, and the registry of all formats.

``lay_out`` creates a checkpoint file with everything except the values, so that programs that know the format can read
it, and returns the place of each tensor's values. One piece of code for all formats writes, digests and reads the
values, directly from and to memory: loading a checkpoint neither trusts nor parses a format's own structures.
"""
