"""Tile shapes: measured ones (tables), the choice among them (select), their files (store)."""
