"""What is measured of jdelta, and of the compilers that it relies on: studies, models, results."""
