"""One request to a replica elsewhere, and its answer as it comes."""
