"""What happens once per training step, and what it costs."""
