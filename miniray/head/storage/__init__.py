"""How the head keeps its state over a restart."""
