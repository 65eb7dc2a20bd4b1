"""What drivers print of their workers' output."""
