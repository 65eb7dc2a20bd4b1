"""Messages between processes of different nodes."""
