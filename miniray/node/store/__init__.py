"""The object store of a node: memory, spilling, admission."""
