"""Checkpoints, and where runs keep them."""
