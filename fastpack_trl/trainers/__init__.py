"""Trainers of TRL with the features around them: what they have in common, preference and online trainers."""
