"""What a plan is made for: chips, targets, topologies, rates."""
