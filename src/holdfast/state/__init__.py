"""The state of training: checkpoints while it runs, restoring it, and its transfer to newcomers.

What talks to other workers raises :class:`~holdfast.errors.PeerFailed` when one of them died.
"""
