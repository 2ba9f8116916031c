"""How many machines: plans for several numbers of devices, and which of them an objective prefers."""
