"""Files of tensors: one module a format, each with the same two acts; see :mod:`~holdfast.checkpoint.files.base`.

``lay_out``
    Makes a file of ours with everything but the values, so that programs that know the format can read it, and says
    where each tensor's values belong. Values are written, digested and read by one piece of code for all formats, straight
    from and to memory: nothing in a format's own structures is trusted, or parsed, when a checkpoint is loaded.
``open``
    Reads tensors of a file that any program wrote. Such files carry no digests, and may be made to do harm: a reader
    decides what a file may contain before it sets memory aside, refuses everything else in one line, and executes nothing.

``kinds.py`` has them by name and by suffix.
"""
