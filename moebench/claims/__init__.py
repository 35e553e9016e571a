"""Reported numbers, the query that computes ours, and the verdict."""
