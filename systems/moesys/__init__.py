"""MoESys (arXiv 2205.10034): experts whose states are larger than the devices, and what follows from that.

README.md lists the files, what each of them shows, and what the paper leaves open.
"""
