"""The model as the training loop sees it: replicated, as a pipeline, or in shards.

What talks to other workers raises :class:`~holdfast.errors.PeerFailed` when one of them died.
"""
