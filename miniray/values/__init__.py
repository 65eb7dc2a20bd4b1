"""Values as bytes: pickling, arrays, tensors, functions and classes."""
