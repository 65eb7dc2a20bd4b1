"""The page, its data and the REST of jobs, served by a process that runs only while it is used."""
