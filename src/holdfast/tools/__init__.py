"""Tools beside training: the doctor, checkpoints and files of other programs, checks and comparisons of runs, and debug bundles."""
