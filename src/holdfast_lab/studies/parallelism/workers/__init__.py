"""Scripts that the study's jobs run."""
