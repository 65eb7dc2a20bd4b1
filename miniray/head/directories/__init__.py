"""What the head knows: nodes, actors, leases, jobs, placement groups."""
