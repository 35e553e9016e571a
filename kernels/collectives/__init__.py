"""Collectives as pairs of Start and Wait, so that what runs between them overlaps, forward and backward."""
