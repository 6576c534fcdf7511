"""The CORE metric of DCLM: the mean of centered accuracies over a bundle of tasks."""
