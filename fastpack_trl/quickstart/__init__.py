"""``fastpack-trl quickstart``: a run on real text, offline."""
