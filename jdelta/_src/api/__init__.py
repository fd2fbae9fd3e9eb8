"""What users call, and the objects that they hold."""
