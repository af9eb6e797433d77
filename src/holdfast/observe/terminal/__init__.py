"""A run on a terminal: its progress, and the table at its end."""
