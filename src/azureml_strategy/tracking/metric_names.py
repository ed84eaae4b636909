"""Makes metric names that MLflow accepts, and lists the limits of MLflow's stores on lengths and counts."""

from __future__ import annotations

import hashlib
import re
import warnings
from functools import lru_cache

# Azure ML refuses a batch with more metrics: https://github.com/mlflow/mlflow/issues/2441 (the service limits list
# 250 rows a batch: https://learn.microsoft.com/azure/machine-learning/resource-limits-capacity).
METRICS_PER_BATCH = 200

# MLflow's REST interface and Azure ML: https://mlflow.org/docs/latest/rest-api.html#log-batch
PARAMS_PER_BATCH = 100
TAGS_PER_BATCH = 100

# Older servers, Azure ML among them, accept no longer value. Lightning's MLFlowLogger cuts at this length too.
PARAM_VALUE_LENGTH = 250

# From Azure ML's service limits, at the address above.
TAG_VALUE_LENGTH = 1000

# Azure ML refuses more in one run: https://github.com/Azure/azure-sdk-for-python/issues/35685
AZURE_PARAMS_PER_RUN = 200


# mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH
_LONGEST = 250
_DIGEST = 16
_REFUSED = re.compile(
    r"[^\w/. -]"  # a character that MLflow refuses
    r"|_(?=x[0-9a-f]+-)"  # an underscore that would be read as the start of an escape code
    r"|(?<![^/])/|/\Z"  # a slash with nothing before it, or at the end
    r"|(?<![^/])\.(?=\.?(?:/|\Z))"  # a part `.` or `..`
)


@lru_cache(maxsize=10_000)
def clean_name(name: str) -> str:
    """Return the name in a form that MLflow accepts; two different names never become the same.

    Warns once about each name that changes.
    """
    clean = _REFUSED.sub(lambda found: f"_x{ord(found[0]):x}-", name) or "_x-"
    if name == "_x-":  # the code of the empty name
        clean = "_x5f-x-"
    if len(clean) > _LONGEST:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
        clean = f"{clean[: _LONGEST - _DIGEST - 1]}_{digest}"
    if clean != name:
        warnings.warn(f"MLflow does not take the name {name!r}; it is logged as {clean!r}.", stacklevel=2)
    return clean
