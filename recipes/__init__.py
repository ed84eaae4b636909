"""Whole runs, each one file, for `azureml-strategy train`."""
