"""Makes docs/pictures/report.png: the page of an example run, as a browser shows it.

    python docs/pictures/report.py        # needs chromium, and Pillow

The run is made up; tests/reporting/example.py logs it into a real store.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1200, 1760


def main() -> None:
    """Log the run, make its page, and take the picture."""
    sys.path.insert(0, str(ROOT))
    from tests.reporting.example import log_run

    from azureml_strategy.reporting.collect import collect_run
    from azureml_strategy.reporting.page import render
    from azureml_strategy.reporting.run_page import run_page

    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlflow.db"
        page, shot = Path(folder) / "report.html", Path(folder) / "report.png"
        page.write_text(render(run_page(collect_run(log_run(store), store))), encoding="utf-8")
        browser = shutil.which("chromium") or "google-chrome"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run([browser, *options, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True)
        picture = Image.open(shot).convert("RGB").resize((WIDTH * 3 // 4, HEIGHT * 3 // 4), Image.Resampling.LANCZOS)
        picture.quantize(200, dither=Image.Dither.NONE).save(Path(__file__).with_suffix(".png"), optimize=True)


if __name__ == "__main__":
    main()
