"""The daemon's part in the objects of its node."""
