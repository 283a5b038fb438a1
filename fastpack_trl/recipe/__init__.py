"""Everything between a YAML or flags and a trainer."""
