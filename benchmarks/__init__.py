"""Measurements. Each module prints one table and writes JSON with `--json FILE`; `make bench` runs them all."""
