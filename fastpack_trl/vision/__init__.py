"""Towers of images: attention over all images or windows of a batch at once, with lengths from the host."""
