"""Experiment trackers: W&B, MLflow, Comet, Trackio, TensorBoard, each fed from the files of the run folder."""
