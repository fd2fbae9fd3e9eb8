"""What XLA does with a mechanism that jdelta relies on, on smallest programs and on models."""
