"""Runs the command line as `python -m azureml_strategy.cli VERB ...`."""

import sys

from azureml_strategy.cli import main

sys.exit(main())
