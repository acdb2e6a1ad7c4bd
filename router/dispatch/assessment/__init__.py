"""Which replicas may serve a request, why the others may not, and what it would cost on each."""
