"""The certificate of a run: checked, compared with another run's, and recomputed by a replay of its steps."""
