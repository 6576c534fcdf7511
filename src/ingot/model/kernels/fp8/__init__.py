"""Linear layers in 8-bit floats: the layer, its quantization kernel, and the product that adds up a gradient."""
