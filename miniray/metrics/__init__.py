"""Metrics of a cluster: text for Prometheus, and the last hour for charts."""
