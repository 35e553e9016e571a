"""Tutel (arXiv 2206.03382): sparse dispatch, batched experts, pipelined exchanges, parallelism that adapts."""
