"""Checkpoints and files of other programs, for people: listed, shown, verified, compared, converted and pruned."""
