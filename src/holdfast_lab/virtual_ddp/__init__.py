"""Many logical data-parallel workers in one process, with all slices of a step at once."""
