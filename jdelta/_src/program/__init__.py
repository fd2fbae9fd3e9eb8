"""A staged program as a graph of named, sized operations."""
