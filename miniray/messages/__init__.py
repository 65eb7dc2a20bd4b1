"""Messages between processes, and the checks of their form."""
