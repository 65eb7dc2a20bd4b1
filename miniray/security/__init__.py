"""Authentication of peers: the join token, TLS, the challenge on Unix sockets."""
