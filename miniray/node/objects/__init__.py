"""What a daemon does for the objects of its node."""
