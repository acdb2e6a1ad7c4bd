"""`make demo`: both tiers, a broker and real traffic on this machine, scene by scene."""
