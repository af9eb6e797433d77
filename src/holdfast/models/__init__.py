"""Models as the training loop sees them: replicated, pipeline-parallel or sharded.

Methods that communicate raise :class:`~holdfast.errors.PeerFailed` when a worker has failed.
"""
