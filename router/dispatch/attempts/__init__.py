"""One request on one replica: its chunks under every bound, a second one beside it, and whose fault an error is."""
