"""Late binding: who waits, who is decided next, who gets a slot, and who is turned away."""
