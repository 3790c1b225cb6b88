"""Tile shapes: what was measured (tables), who picks (select), how to measure more (search)."""
