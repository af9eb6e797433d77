"""Starting the workers of a job on this machine, watching them, and starting them again.

``worker`` is what mpirun starts: it runs the script, and tells how it ended. ``launcher`` starts
mpirun and follows what the workers write down; ``judge`` decides what that means, and touches nothing.
Nothing is imported here, so that a worker can fork before anything heavy is loaded.
"""
