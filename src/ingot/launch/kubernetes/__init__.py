"""Kubernetes: JobSet, TrainJob and PyTorchJob objects, kubectl, the agent in a pod."""
