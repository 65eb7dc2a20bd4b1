"""Shared by the parts of a daemon: clients, sockets, its configuration."""
