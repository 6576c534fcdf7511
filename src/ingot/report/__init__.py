"""What a run shows and writes: console, metrics file, TensorBoard, plots."""
