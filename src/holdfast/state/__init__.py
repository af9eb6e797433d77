"""The state of a job at one worker: its context and its log, checkpoints during training, and state transfer.

Functions that communicate with other workers raise :class:`~holdfast.errors.PeerFailed` when a worker fails.
"""
