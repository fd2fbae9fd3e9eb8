"""A plan for people: table, explanation, pictures, page, exports."""
