"""Tools beside training: the doctor, and what is needed to debug a run. The core does not need them."""
