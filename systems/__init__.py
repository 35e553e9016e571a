"""How each system realises a Mixture-of-Experts layer with the shared kernels; knows nothing of the harness."""
