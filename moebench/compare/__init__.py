"""Two runs side by side, a run beside a baseline, many runs one after another: what changed, and whether it counts."""
