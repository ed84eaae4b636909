"""The ImageNet recipe as a user types it, on made-up class folders: as they are, packed, and packed as pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from tests.training.conftest import COMMAND, MATRIX, Compose, run, the_run

CLASSES = ("n01440764", "n01443537", "n02084071")
SMALL = [
    *("num_classes=3", "data.image_size=32", "data.batch_size=4", "data.num_workers=1", "trainer.precision=32-true"),
    *("trainer.accelerator=cpu", "trainer.max_epochs=1", "trainer.log_every_n_steps=1", "model.warmup_epochs=0"),
    *MATRIX,
]


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Class folders of JPEGs of all sorts: large and small, wide and tall, grey, CMYK, and a PNG named as a JPEG."""
    random = np.random.default_rng(0)
    for part, each in (("train", 5), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for number in range(each):
                width, height = int(random.integers(40, 300)), int(random.integers(40, 300))
                small = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
                small[..., label] = 255
                image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
                mode = {0: "L", 1: "CMYK"}.get(number, "RGB") if part == "train" and label == 0 else "RGB"
                form = "PNG" if number == 2 and label == 1 else "JPEG"
                image.convert(mode).save(folder / f"{name}_{number}.JPEG", format=form)
    return tmp_path / "imagenet"


def losses(store: MlflowClient) -> list[float]:
    mine = the_run(store)
    assert {"val/loss", "val/top1", "val/top5"} <= mine.data.metrics.keys()
    return [metric.value for metric in store.get_metric_history(mine.info.run_id, "train/loss")]


def test_it_trains_on_class_folders(imagenet: Path, store: MlflowClient) -> None:
    output = run(COMMAND, "train", "resnet50_imagenet", f"data.root={imagenet}", *SMALL).stdout
    assert len(losses(store)) == 3, output  # 15 images, 4 a step
    assert "unreadable" not in output


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(["--resize", "48"], id="jpeg"),
        pytest.param(["--resize", "48", "--raw"], id="raw", marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains_on_packed_shards(imagenet: Path, tmp_path: Path, store: MlflowClient, pack: list[str]) -> None:
    packed, cache = tmp_path / "packed", tmp_path / "cache"
    run(COMMAND, "data", "pack", imagenet, packed, "--shard-size", "40KB", *pack)
    overrides = ["data=imagenet_shards", f"data.root={packed}", f"data.cache={cache}", "data.cache_limit=10MB"]
    raw = ["data.crop=window"] if "--raw" in pack else ["data.shuffle=window", "data.window=2"]
    output = run(COMMAND, "train", "resnet50_imagenet", *overrides, *raw, *SMALL).stdout
    assert len(losses(store)) == 3, output
    assert "unreadable" not in output
    assert len(list(cache.glob("*/present"))) == 2, "the cache was used, for training and validation"


def test_only_class_folders_are_a_jobs_input(composed: Compose) -> None:
    assert composed("resnet50_imagenet").job.inputs.images.sets == "data.root"
    assert not composed("resnet50_imagenet", "data=imagenet_shards").job.get("inputs")
