"""Starts the workers of a job on this machine, monitors them, and restarts them.

``supervise/worker`` is the program that mpirun starts: it runs the script, and records how it ended. ``launcher`` starts
mpirun and reads the workers' records; ``job_state`` decides what they mean, without side effects. ``fleet/`` has the machines
of the job, ``health/`` what is wrong with workers. Nothing is imported here, so that a worker can fork before any large
library is loaded.
"""
