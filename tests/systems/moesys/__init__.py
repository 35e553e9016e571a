"""Tests of moebench.systems.moesys."""
