"""Whole models as workloads: plain torch over the shared kernels, with an exchange in every MoE layer."""
