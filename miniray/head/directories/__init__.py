"""The head's directories: nodes, actors, leases, jobs, placement groups."""
