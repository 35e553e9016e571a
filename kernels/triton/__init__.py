"""Triton code, one file an operator: device kernels, launchers with the results of the torch code, `variants()`.

Imported at an operator's first launch (`define.py`), never by the operator's own file.
"""
