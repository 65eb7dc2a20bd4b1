"""Values that move between nodes."""
