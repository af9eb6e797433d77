"""The state of training: checkpoints while it runs, restoring it, and its transfer to newcomers."""
