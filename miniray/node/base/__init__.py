"""What the parts of a daemon share: clients, sockets, its configuration."""
