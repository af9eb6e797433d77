"""The training state: checkpoints during training, restoring, and state transfer to newcomers.

Functions that communicate with other workers raise :class:`~holdfast.errors.PeerFailed` when a worker fails.
"""
