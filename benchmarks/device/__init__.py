"""What is run: on an attached GPU, or on this machine's CPU and disk."""
