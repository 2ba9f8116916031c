"""``tapestry compare``: the plan beside one that somebody else would make, step by step, and what that one should change."""
