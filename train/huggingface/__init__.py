"""Training with the libraries of Hugging Face; the names are those of Ray Train's modules."""
