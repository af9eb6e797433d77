"""The deterministic all-reduce, whose order of additions is fixed for the job, and its transports."""
