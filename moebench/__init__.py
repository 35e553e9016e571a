"""moebench: is a Mixture-of-Experts systems paper right, where, and why?"""

__version__ = "0.1.0"
