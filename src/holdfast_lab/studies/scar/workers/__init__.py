"""Scripts that the study starts in processes of their own."""
