"""From a YAML or flags to a trainer."""
