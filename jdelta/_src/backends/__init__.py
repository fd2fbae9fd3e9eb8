"""What a plan is made for: chips, targets, topologies, rates, and the habits of compilers."""
