"""The shared building blocks of every system: one operator a file, collectives, regions, host reads."""
