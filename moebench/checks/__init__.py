"""Correct before fast: what must hold of a system, a kernel, an exchange or a part before any number of it counts."""
