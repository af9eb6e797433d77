"""Tools beside training: the doctor, checks and comparisons of runs, and debug bundles. The core does not need them."""
