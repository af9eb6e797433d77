"""Tensor files of other programs: one module per format, each with one or both of two operations.

``lay_out``
    Writes checkpoints in the format; see :class:`~holdfast.checkpoint.files.base.TensorWriter`. The core finds it by the
    format's name (:mod:`holdfast.checkpoint.files.registry`).
``open``
    Reads tensors of a file that any program wrote; see :class:`~holdfast.tools.formats.base.TensorReader`. Such files
    carry no digests and may be malicious: a reader validates a file's content before it allocates memory, rejects
    everything else in one line, and executes nothing.

``kinds.py`` lists the readers by suffix.
"""
