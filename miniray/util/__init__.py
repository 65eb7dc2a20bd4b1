"""The public modules beside the core API: placement groups, scheduling strategies, pools, queue."""
