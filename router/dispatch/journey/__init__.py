"""A request over as many attempts as it takes: what they teach, and what became of it."""
