"""Calls that are under way: arguments, leases, retries, lineage."""
