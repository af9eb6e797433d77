"""Scripts that the study starts as processes, one per framework."""
