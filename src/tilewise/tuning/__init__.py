"""Tile shapes: measured ones (tables), the choice among them (select), their files (store), and the
sweep that finds others (search).
"""
