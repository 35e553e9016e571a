"""Lancet (arXiv 2404.19429): passes over the graph of a whole training step that put computation under collectives.

`capture` makes the graph, `gradient_sync` adds the data-parallel sums, `plan` makes it plain data, `executor` runs that
on real ranks or on meta.
"""
