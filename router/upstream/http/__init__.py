"""Bytes to and from a server: connections and the HTTP client over them, and the small parts of a probe."""
