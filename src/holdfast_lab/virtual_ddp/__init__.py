"""Many virtual data-parallel workers in one process, with all slices of a step computed together."""
