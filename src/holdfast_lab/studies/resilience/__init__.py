"""What failures cost in accuracy and in time (Nicolae 2022)."""
