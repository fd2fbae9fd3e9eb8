"""What happens while a user's step is traced: regions marked, found, cut, named and grouped."""
