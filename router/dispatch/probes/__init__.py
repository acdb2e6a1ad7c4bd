"""Requests of our own, past the queue: of a replica on which requests fail, and of both deployments of a canary."""
