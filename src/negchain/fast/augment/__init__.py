"""Kernels of `negchain.augment`."""
