"""One command on every host of an allocation becomes a cluster; schedulers are never contacted."""
