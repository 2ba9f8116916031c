"""Plans in the words of other tools: one module for each format that `tapestry export` writes."""
