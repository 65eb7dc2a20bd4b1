"""The runtime of drivers and workers: attached to a node, asks the head."""
