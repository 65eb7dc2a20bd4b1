"""Worker processes: started, reused, ended."""
