"""The laws of a plan for every size of a region."""
