"""Sockets between processes of one node, and the loop that reads and writes them."""
