"""Which clients work, unmodified, against which servers: `make compatibility`, `python -m benchmarks compatibility`."""
