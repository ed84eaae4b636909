"""Training crops of ImageNet-like JPEGs, and of pixels, that one core makes in a second.

    python benchmarks/decode_images.py

Each case makes batches as a loader's worker does, by one thread: from records in memory to the collated batch. What is
counted is the processor's time. The images are made here: noise of all scales, with the spectrum of photographs, 500 x
375 pixels, in about 110 kB. Records of pixels are the same images with a shorter side of 256 pixels.

The peers are the decoder that this package had before (Pillow, which decodes JPEGs at a reduced size where it can, and
resizes the crop), and the usual pipeline of torchvision, written out by Pillow: RandomResizedCrop,
RandomHorizontalFlip, PILToTensor.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, interleave, ratios, save, show, spread
from PIL import Image
from torch.utils.data import default_collate

from azureml_strategy.data.decoding import Crop, random_crop
from azureml_strategy.data.images import TrainingImages, collate_images

NAME = "decode_images"
WIDTH, HEIGHT, SHORTER, SIZE = 500, 375, 256, 224
QUALITY = 94
TARGETS = "simplejpeg: 1.5 of before, 2.0 of torchvision's; window of pixels: 20 of before"


class Memory:
    """Records in memory, all of one class."""

    classes = ("one",)

    def __init__(self, records: list[bytes]) -> None:
        self.records = records
        self.labels = np.zeros(len(records), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.records)

    def name(self, number: int) -> str:
        return str(number)

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        return [self.records[number] for number in numbers]


def photograph(seed: int) -> Image.Image:
    """Noise of each octave, of an amplitude that falls with its frequency as in photographs; grey for the most part."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(3, HEIGHT, WIDTH)
    for octave in range(1, 10):
        waves = 2**octave
        shape = (max(round(waves * HEIGHT / WIDTH), 2), waves)
        noise = torch.randn(1, *shape, generator=generator) + 0.35 * torch.randn(3, *shape, generator=generator)
        layer = torch.nn.functional.interpolate(noise[None], (HEIGHT, WIDTH), mode="bicubic", align_corners=False)[0]
        total += layer * waves**-0.2
    pixels = (127 + 55 * (total - total.mean()) / total.std()).clamp(0, 255).byte()
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def numpy_file(image: Image.Image) -> bytes:
    file = io.BytesIO()
    small = image.resize((round(WIDTH * SHORTER / HEIGHT), SHORTER), Image.Resampling.BICUBIC)
    np.save(file, np.asarray(small))
    return file.getvalue()


def before(record: bytes, rng: random.Random) -> torch.Tensor:
    """The decoder that this package had in its place."""
    with Image.open(io.BytesIO(record), formats=("JPEG", "PNG", "WEBP", "BMP")) as image:
        width, height = image.size
        crop: Crop = random_crop(width, height, 0.08, True, rng)
        image.draft(None, (math.ceil(SIZE * width / crop.width), math.ceil(SIZE * height / crop.height)))
        across, down = image.size[0] / width, image.size[1] / height
        right = min((crop.left + crop.width) * across, image.size[0])
        bottom = min((crop.top + crop.height) * down, image.size[1])
        box = (crop.left * across, crop.top * down, right, bottom)
        square = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    if crop.flip:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def as_torchvision(record: bytes, rng: random.Random) -> torch.Tensor:
    image = Image.open(io.BytesIO(record)).convert("RGB")
    left, top, width, height, flip = random_crop(*image.size, 0.08, True, rng)
    part = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if flip:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(part, copy=True)).permute(2, 0, 1).contiguous()


def peer(
    decode: Callable[[bytes, random.Random], torch.Tensor], records: list[bytes], draws: range
) -> tuple[torch.Tensor, torch.Tensor]:
    return default_collate([(decode(records[draw % len(records)], random.Random(f"0/{draw}")), 0) for draw in draws])


def ours(images: TrainingImages, draws: range) -> tuple[torch.Tensor, torch.Tensor]:
    return collate_images(images.__getitems__(draws))


def images_per_second(make_batch: Callable[[range], Any], batch_size: int, batches: int) -> float:
    begin = time.process_time()
    for batch in range(batches):
        images, _ = make_batch(range(batch * batch_size, (batch + 1) * batch_size))
        assert images.shape == (batch_size, 3, SIZE, SIZE)
    return batch_size * batches / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--batches", type=int, default=3, help="in each turn; of pixels, ten times as many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    photographs = [photograph(seed) for seed in range(64)]
    jpegs, pixels = [jpeg(each) for each in photographs], [numpy_file(each) for each in photographs]
    run = partial(images_per_second, batch_size=options.batch_size)
    many = 10 * options.batches
    cases = {
        "before": partial(run, partial(peer, before, jpegs), batches=options.batches),
        "torchvision": partial(run, partial(peer, as_torchvision, jpegs), batches=options.batches),
        "pillow": partial(run, partial(ours, TrainingImages(Memory(jpegs), decoder="pillow")), batches=options.batches),
        "simplejpeg": partial(
            run, partial(ours, TrainingImages(Memory(jpegs), decoder="simplejpeg")), batches=options.batches
        ),
        "pixels, resized": partial(run, partial(ours, TrainingImages(Memory(pixels))), batches=many),
        "pixels, window": partial(run, partial(ours, TrainingImages(Memory(pixels), crop="window")), batches=many),
    }
    measured = interleave(cases, options.rounds)
    figures = {
        name: {
            "images_per_cpu_second": spread(values),
            "to_before": ratios(values, measured["before"]),
            "to_torchvision": ratios(values, measured["torchvision"]),
        }
        for name, values in measured.items()
    }
    settings = {
        "rounds": options.rounds,
        "batch_size": options.batch_size,
        "batches": options.batches,
        "jpeg_bytes": round(statistics.mean(map(len, jpegs))),
        "image_size": SIZE,
        "targets": TARGETS,
    }
    save(NAME, settings, figures, options.results)
    rows = [
        [name, *(each[key].text(digits=digits) for key, digits in zip(each, (0, 2, 2), strict=True))]
        for name, each in figures.items()
    ]
    title = f"Crops of {SIZE} pixels a CPU-second; JPEGs of {settings['jpeg_bytes'] / 1e3:.0f} kB"
    show(title, ["decoder", "images", "to before", "to torchvision's"], rows)


if __name__ == "__main__":
    main()
