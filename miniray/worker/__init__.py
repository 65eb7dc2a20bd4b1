"""The worker process: entry and executors."""
