"""Callbacks for any trainer of TRL."""
