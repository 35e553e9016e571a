"""Tidy rows and the run folder."""
