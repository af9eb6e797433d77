"""The machines of a job: one, hosts of mpirun, or nodes with launchers of their own; and faults that are injected into them."""
