"""What `azureml-strategy init` writes; links make it a package, as the folders of the configuration."""
