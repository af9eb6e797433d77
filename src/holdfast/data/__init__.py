"""Which samples make up a step, how they are cut into slices, and which worker computes which slice."""
