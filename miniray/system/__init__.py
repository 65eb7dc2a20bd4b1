"""This machine and its user: sessions, addresses, logs, and how a node is started."""
