"""Rows of a run in the formats of other tools."""
