"""The head process: resource table, scheduler, directories, storage."""
