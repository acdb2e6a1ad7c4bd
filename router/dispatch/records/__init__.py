"""What is kept of every request: the record of its decisions, what is told of it, and the metrics."""
