"""What the guard finds, heals and costs."""
