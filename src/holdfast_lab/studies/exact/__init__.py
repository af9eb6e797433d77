"""What exactness costs, and what it buys."""
