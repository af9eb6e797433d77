"""A summary of a run, from its records: its history, its goodput, ``report.json``, and events in one line each."""
