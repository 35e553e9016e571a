"""What follows from an engine's numbers, kind by kind, as tidy rows: bandwidths, floors, steps of whole jobs."""
