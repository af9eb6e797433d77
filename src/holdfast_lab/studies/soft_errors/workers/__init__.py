"""Code that runs in the study's worker processes."""
