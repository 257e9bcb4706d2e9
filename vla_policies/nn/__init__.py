"""Neural networks of the policies, on torch alone."""
