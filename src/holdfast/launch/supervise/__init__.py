"""The workers of a machine: how they are started, watched, and ended."""
