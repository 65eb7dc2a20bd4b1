"""The runtime of drivers and workers: attached to a node, calls the head."""
