"""One build for every size in a range: plans at some sizes, written as one plan whose sizes are symbols, and its regions."""
