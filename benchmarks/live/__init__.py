"""What the benchmarks over real tiers share: the tiers, a workload cut from a trace, and a client that times it."""
