"""What Azure's instance metadata service says of the machine, without ever delaying a start."""

from __future__ import annotations

import http.client
import re
import threading
from pathlib import Path
from urllib.parse import urlsplit

from azureml_strategy.network.files import read_text

# The same for every Azure VM; "MSFT AZURE VM" in ASCII. cloud-init and Azure's own agents decide by it.
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
VM_SIZE_URL = "http://169.254.169.254/metadata/instance/compute/vmSize?api-version=2021-01-01&format=text"
# The service answers from the host itself, in milliseconds; in a container it may be blocked.
TIMEOUT_SECONDS = 0.5
_NAME = re.compile(r"[\w-]{1,64}", re.A)  # Standard_ND96isr_H100_v5, Standard_HB120-16rs_v3


def is_azure_vm(sysfs: str | Path = "/sys") -> bool:
    """Whether this machine is an Azure VM, by its chassis; no network is touched."""
    return read_text(Path(sysfs) / "class/dmi/id/chassis_asset_tag") == _AZURE_ASSET_TAG


def instance_vm_size(url: str = VM_SIZE_URL, timeout_s: float = TIMEOUT_SECONDS) -> str | None:
    """The VM size that the metadata service names; None where it does not answer in time.

    Asked directly, past any proxy, on a thread: a socket's own time-out starts anew with each byte that drips in.

    Args:
        url: the service's address.
        timeout_s: the longest this may take, in seconds.
    """
    answers: list[str] = []
    thread = threading.Thread(target=_ask, args=(url, timeout_s, answers), name="instance-metadata", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _ask(url: str, timeout_s: float, answers: list[str]) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
    try:
        connection.request("GET", f"{address.path}?{address.query}", headers={"Metadata": "true"})
        response = connection.getresponse()
        text = response.read(256).decode("ascii", "replace").strip()
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()
    if response.status == 200 and _NAME.fullmatch(text):
        answers.append(text)
