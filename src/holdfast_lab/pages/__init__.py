"""HTML pages of demos, studies, simulations and plans."""
