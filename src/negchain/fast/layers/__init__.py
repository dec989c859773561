"""Layers of image encoders that torch leaves slow in small batches on a GPU.

    residual          a ResNet's blocks without normalisation, ReLUs inside the convolutions
    faster            the context in which an encoder's own layers run these functions
    masked, few_channels, max_pool    kernels of blocks, of a first layer and of max-pooling

Outside the context the encoder runs torch's layers, the readable twins.
"""

from negchain.fast.layers.faster import faster_layers
from negchain.fast.layers.residual import is_fused
from negchain.fast.streams import WeightGradients

__all__ = ["WeightGradients", "faster_layers", "is_fused"]
