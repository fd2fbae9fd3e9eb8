"""A step as a planning problem: residuals, region inputs, links to other memories, pins."""
