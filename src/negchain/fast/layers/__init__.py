"""Layers of image encoders that torch leaves slow in small batches on a GPU.

    weight_gradients  gradients of weights on a stream of their own
    convolution       parts of convolutions, and a first layer
    residual          a ResNet's blocks without normalisation, ReLUs inside the convolutions
    masked            a kernel of their backward pass
    few_channels      kernels of a first layer
    max_pool          kernels of max-pooling
    faster            the context in which an encoder's own layers are answered by these

The encoder itself is not touched: outside the context it runs torch's layers, the readable twin.
"""

from negchain.fast.layers.faster import FasterLayers
from negchain.fast.layers.residual import is_fused
from negchain.fast.layers.weight_gradients import WeightGradients

__all__ = ["FasterLayers", "WeightGradients", "is_fused"]
