"""The scheduler: pure decisions on resources, queues and placement."""
