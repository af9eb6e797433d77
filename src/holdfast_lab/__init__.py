"""The laboratory: studies of published experiments, the simulator and the planner, and bit flips in checkpoint files."""
