"""What one call to a tracking store may carry.

Azure ML's limits are below MLflow's own (1000 metrics, values of 6000 characters), and the tighter one is kept
everywhere so that a run looks the same in every store.
"""

from __future__ import annotations

# Azure ML refuses a batch with more metrics: https://github.com/mlflow/mlflow/issues/2441 (the service limits list
# 250 rows a batch: https://learn.microsoft.com/azure/machine-learning/resource-limits-capacity).
METRICS_PER_BATCH = 200

# MLflow's REST interface and Azure ML: https://mlflow.org/docs/latest/rest-api.html#log-batch
PARAMS_PER_BATCH = 100
TAGS_PER_BATCH = 100

# Older servers, Azure ML among them, take no longer one; Lightning's MLFlowLogger cuts here too.
PARAM_VALUE_LENGTH = 250

# Azure ML's service limits, at the address above, for a run's tags.
TAG_VALUE_LENGTH = 1000

# Azure ML refuses more in one run: https://github.com/Azure/azure-sdk-for-python/issues/35685
AZURE_PARAMS_PER_RUN = 200
