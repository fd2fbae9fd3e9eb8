"""Programs that people bring: is every promise kept for each?"""
