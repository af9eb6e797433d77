"""The samples of a step, how they are cut into slices, and the assignment of slices to workers."""
