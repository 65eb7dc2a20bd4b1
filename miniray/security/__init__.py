"""Who may talk to whom: the join token, TLS, the challenge on Unix sockets."""
