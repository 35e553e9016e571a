"""Which parallel setting is fastest for a model on a topology: all of them tried, from cheap reasons to full estimates.

`space` lists settings and drops those whose numbers do not go; `estimate` says what one costs, from stages of two and
three layers; `search` rejects what does not fit, leaves out what can't be best and ranks the rest; `band` says how far
the ranking is decided. Everything is traced and priced by what simulates jobs (moebench.trace.job, moebench.sim.job).
"""
