"""Tensor file formats: one module per format, each with one or both of two operations; see :mod:`~holdfast.checkpoint.files.base`.

``lay_out``
    Creates a checkpoint file with everything except the values, so that programs that know the format can read it, and returns
    the place of each tensor's values. One piece of code for all formats writes, digests and reads the values, directly
    from and to memory: loading a checkpoint neither trusts nor parses a format's own structures.
``open``
    Reads tensors of a file that any program wrote. Such files carry no digests and may be malicious: a reader
    validates a file's content before it allocates memory, rejects everything else in one line, and executes nothing.

``kinds.py`` lists the formats by name and by suffix.
"""
