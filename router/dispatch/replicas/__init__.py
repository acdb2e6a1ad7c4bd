"""The replicas of a tier as decisions see them."""
