"""Which workers of a job are dead, hung, slow, or keep it from beginning."""
