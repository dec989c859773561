"""Data: from digits, torchvision sets and folders of images to sets with stable positions."""

from negchain.data.image_set import DataBundle, ImageSet, stream_batches
from negchain.data.sources import BUILT_IN, load_data

__all__ = ["BUILT_IN", "DataBundle", "ImageSet", "load_data", "stream_batches"]
