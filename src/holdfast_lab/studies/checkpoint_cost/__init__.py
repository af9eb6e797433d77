"""What checkpoints cost, framework by framework (Rojas 2020)."""
