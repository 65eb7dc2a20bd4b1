"""Calls in flight: arguments, leases, retries, lineage."""
