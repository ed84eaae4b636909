"""The container image that jobs run in by default: a Dockerfile and a conda file."""
