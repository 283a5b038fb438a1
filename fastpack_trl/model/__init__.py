"""Reading from, and changing, a model that others made."""
