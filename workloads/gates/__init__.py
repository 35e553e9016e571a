"""Routing rules: one file a gate, each the definition of who goes where, with which weight."""
