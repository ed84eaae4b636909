"""Names of metrics, parameters and tags as MLflow takes them: one to one.

MLflow takes letters and digits of any script, `_`, `-`, `.`, space, and `/` between parts that are neither empty nor
`.` or `..` (mlflow.utils.validation). Every other character becomes `_xHEX-`, HEX being its code point: `acc@1` is
logged as `acc_x40-1`, and a name that already looks so has the code of its underscore there (`_x5f-`). The colon is
among the others: MLflow before 2.16 and servers on Windows refuse it.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from functools import lru_cache

# mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH
_LONGEST = 250
_DIGEST = 16
_REFUSED = re.compile(
    r"[^\w/. -]"  # a character that MLflow refuses
    r"|_(?=x[0-9a-f]+-)"  # what would be read as the code of one
    r"|(?<![^/])/|/\Z"  # a slash with nothing before it, or at the end
    r"|(?<![^/])\.(?=\.?(?:/|\Z))"  # a part `.` or `..`
)


@lru_cache(maxsize=10_000)
def clean_name(name: str) -> str:
    """The name as MLflow takes it; two different names never become one. Warns once of a name that changes."""
    clean = _REFUSED.sub(lambda found: f"_x{ord(found[0]):x}-", name) or "_x-"
    if name == "_x-":  # which stands for the empty name
        clean = "_x5f-x-"
    if len(clean) > _LONGEST:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
        clean = f"{clean[: _LONGEST - _DIGEST - 1]}_{digest}"
    if clean != name:
        warnings.warn(f"MLflow does not take the name {name!r}; it is logged as {clean!r}.", stacklevel=2)
    return clean
