"""What a compiled program does take, read from its text."""
