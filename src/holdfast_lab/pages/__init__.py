"""Pages of studies, simulations and plans."""
