"""A server behind a URL, one file a kind: what it is, what it serves, and what it has to do."""
