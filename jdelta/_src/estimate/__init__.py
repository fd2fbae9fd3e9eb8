"""What a compiled program would take: buffers, traffic, seconds, memory, collectives."""
