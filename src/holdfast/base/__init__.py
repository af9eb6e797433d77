"""What every room needs: time, errors of devices and systems, options, and what is private to torch."""
