"""The real program on this machine, by the wall clock."""
