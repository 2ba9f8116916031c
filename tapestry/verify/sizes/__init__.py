"""Laws of a plan whose sizes are symbols, proved for every size of a region at once."""
