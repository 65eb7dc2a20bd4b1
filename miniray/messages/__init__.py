"""What travels between processes, and how its form is checked."""
