"""What is read from, and changed on, a model that others made."""
