"""Everything private of jdelta, one package for each job. ``docs/architecture.md`` has the map."""
