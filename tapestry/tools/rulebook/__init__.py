"""The laboratory of rules: forms that they make of a small graph, equations nobody wrote yet, what each is worth."""
