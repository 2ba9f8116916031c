"""Rules that make one operation of several."""
