"""Orders of operators, and what they make a step allocate."""
