"""The node daemon: workers, objects, relay, logs."""
