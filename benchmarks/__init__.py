"""In-house measurements, beside the package: not part of the wheel."""
