"""What every driver and worker runs: calls, references, values, sockets."""
