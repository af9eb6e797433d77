"""Scripts that the study starts in separate processes."""
