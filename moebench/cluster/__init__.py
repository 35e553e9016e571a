"""The engine of real ranks: under torchrun or srun, or on a cluster emulated on this machine."""
