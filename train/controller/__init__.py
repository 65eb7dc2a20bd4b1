"""The controller of a run: starts, watches, restarts ranks."""
