"""The model as the training loop sees it: replicated, as a pipeline, or in shards."""
