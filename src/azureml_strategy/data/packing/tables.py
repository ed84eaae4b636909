"""Unpacks the images of a Hugging Face data set, Parquet or Arrow files, so that they can be read in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from azureml_strategy.data.folders import EXTENSIONS, file_digest
from azureml_strategy.data.packing.images import ImageForm, Samples, image_records
from azureml_strategy.data.packing.parts import Part, by_split
from azureml_strategy.data.packing.shards import PackError, Records, atomic_write
from azureml_strategy.data.packing.workers import Task
from azureml_strategy.data.shard_index import numbered_classes
from azureml_strategy.data.skipped import PassedOver, first_names, is_no_data, warn
from azureml_strategy.files import OutsideError, name_within
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    import pyarrow

_SUFFIXES = (".parquet", ".arrow")
# Files that the library writes beside the tables: descriptions, and what `map` and `filter` keep.
_OF_LIBRARY = ("state.json", "dataset_info", "dataset_dict.json", "cache-", "tmp")
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
# Rows that are in memory at once; a row holds an image.
_ROWS = 64


class Columns(NamedTuple):
    """The columns of a table that are packed, and the names of the classes; empty if the labels are only numbers."""

    image: str
    label: str
    classes: tuple[str, ...]


@dataclass
class TablePart(Part):
    """The tables of a split."""

    source: Path  # the folder of the data set
    names: list[str]  # paths of the files below it, in their order
    form: ImageForm

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """See `Part`."""
        return file_digest(self.source, self.names)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Rows of all files."""
        return sum(count_rows(self.source / name) for name in self.names)

    @cached_property
    def columns(self) -> Columns:
        """The columns, which are the same in all files.

        Raises:
            PackError: they are not, or it is unclear which are meant.
        """
        first, *others = [(name, find_columns(self.source / name)) for name in self.names]
        for name, columns in others:
            if columns != first[1]:
                raise PackError(
                    f"{name} has other columns or classes than {first[0]}: are these two data sets? Give one."
                )
        return first[1]

    @override
    def tasks(self, work: Path) -> Sequence[Task]:
        if (work / "samples").is_dir():
            return ()
        unpacked = work / "unpacked"
        unpacked.mkdir(parents=True, exist_ok=True)
        names = enumerate(self.names)
        return [UnpackTask(self.source / name, self.columns, unpacked / f"{number:06}") for number, name in names]

    @override
    def examples(self) -> Iterator[bytes]:
        for image, _ in read_rows(self.source / self.names[0], self.columns):
            content = _content(image)
            if content is not None:
                yield content

    @override
    def records(self, work: Path, workers: int) -> Records:
        unpacked = work / "unpacked"
        return image_records(work, str(unpacked), "row", self.form, lambda: self._samples(unpacked))

    def _samples(self, unpacked: Path) -> Samples:
        files = [f"{number:06}" for number in range(len(self.names))]
        tables = [np.load(unpacked / f"{name}.npz") for name in files]
        rows = [len(table["length"]) for table in tables]
        length, label = (np.concatenate([table[name] for table in tables]) for name in ("length", "label"))
        offset = np.concatenate([np.cumsum(table["length"]) - table["length"] for table in tables])
        classes = self.columns.classes or numbered_classes(f"Column {self.columns.label}", label)
        if int(label.min()) < 0 or int(label.max()) >= len(classes):
            raise PackError(
                f"The labels in column {self.columns.label} of {self.names[0]} are from {label.min()} to "
                f"{label.max()}, and there are {len(classes)} classes. Images without a label (-1) cannot be packed: "
                "leave this split out."
            )
        return Samples(
            str(unpacked),
            classes,
            np.array([name.encode() for name in files], np.bytes_),
            np.array([os.fsencode(name) for name in self.names], np.bytes_),
            np.repeat(np.arange(len(files), dtype=np.uint32), rows),
            offset,
            length,
            label,
            np.concatenate([np.arange(count) for count in rows]),
            unit="row",
        )


@dataclass(frozen=True)
class UnpackTask:
    """Writes the images of one table one after the other into one file.

    The lengths and labels of the images are written beside it, as `.npz`, last.
    """

    table: Path
    columns: Columns
    target: Path

    @property
    def _kept(self) -> Path:
        return self.target.with_suffix(".npz")

    def is_done(self) -> bool:
        """Whether an earlier run has unpacked it."""
        return self._kept.is_file()

    def run(self, advance: Callable[[], None]) -> None:
        """Unpack it, all or nothing.

        Raises:
            PackError: a row has no image or no label in it.
        """
        lengths: list[int] = []
        labels: list[int] = []
        with atomic_write(self.target) as file:
            for image, label in read_rows(self.table, self.columns):
                content = _content(image)
                if content is None or label is None:
                    raise PackError(self._missing(len(lengths), image, "image" if content is None else "label"))
                file.write(content)
                lengths.append(len(content))
                labels.append(label)
                advance()
        with atomic_write(self._kept) as file:
            np.savez(file, length=np.array(lengths, np.int64), label=np.array(labels, np.int32))

    def _missing(self, row: int, image: Any, what: str) -> str:
        path = image.get("path") if isinstance(image, Mapping) else None
        pointed = f", only the path {path}: save it with the images inside, `embed_table_storage`" if path else ""
        return (
            f"{self.table}: row {row} has no {what} in it{pointed}. Fill it in, or filter the row out, and pack again."
        )


def _content(image: Any) -> bytes | None:
    """Return the image file in a cell of an image column, or of a column of plain bytes."""
    return image.get("bytes") if isinstance(image, Mapping) else image


def find_tables(source: Path, form: ImageForm) -> dict[str, Part]:
    """Find the Parquet or Arrow files of a Hugging Face data set below a folder; nothing if there are none.

    Raises:
        PackError: it is unclear what to pack, or pyarrow is missing.
    """
    names, others = _table_names(source)
    if not names:
        return {}
    if others:
        warn(
            f"{source}: {len(names):,} Parquet or Arrow files are packed, and {others.count:,} other files are passed "
            f"over: {others}. Write what is to be packed into such files too, or move it to a folder of its own."
        )
    parts = {split: TablePart(source, own, form) for split, own in by_split(names, source).items()}
    if len({part.columns for part in parts.values()}) > 1:
        raise PackError(f"{source}: training and validation have other columns or classes. Is this one data set?")
    part = next(iter(parts.values()))
    columns = part.columns
    unpacked = [name for name in _schema(source / part.names[0]).names if name not in columns[:2]]
    if unpacked:
        warn(
            f"{source}: the columns {columns.image} and {columns.label} are packed, and {len(unpacked)} others are "
            f"not: {first_names(unpacked)}."
        )
    return dict(parts)


def _table_names(source: Path) -> tuple[list[str], PassedOver]:
    """Return the tables below a folder, and the other files beside them."""
    found: list[str] = []
    others = PassedOver()
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        holds_tables = any(name.endswith(_SUFFIXES) for name in files)
        if not found and not holds_tables and any(name.lower().endswith(EXTENSIONS) for name in files):
            return [], others  # class folders: there may be thousands more, and listing a mount takes time
        place = Path(folder).relative_to(source)
        own = _own_tables(Path(folder), files) if holds_tables else []
        found += [str(place / name) for name in own]
        for name in sorted(set(files) - set(own)):
            if not is_no_data(name) and not name.startswith(_OF_LIBRARY):
                others.add(str(place / name))
    return found, others


def _own_tables(folder: Path, files: Sequence[str]) -> list[str]:
    """Return the tables of a data set in a folder, without what `map` and `filter` keep beside them."""
    if "state.json" not in files:  # not of `save_to_disk`
        return sorted(name for name in files if name.endswith(_SUFFIXES) and not name.startswith((".", "cache-")))
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise PackError(
            f"{folder} is a selection of rows: write it out by `dataset.flatten_indices().save_to_disk(...)`."
        )
    try:
        names: list[str] = [file["filename"] for file in state["_data_files"]]
        for name in names:
            name_within(folder, name)
    except (KeyError, TypeError, OutsideError) as error:
        raise PackError(
            f"{folder / 'state.json'} names no tables of its folder: {error}. Save the data set anew."
        ) from error
    return names


def _read_json(source: Path | bytes) -> dict[str, Any]:
    """Return the mapping in a JSON text; an empty one if it holds something else.

    Raises:
        PackError: it is no JSON.
    """
    try:
        found = json.loads(source if isinstance(source, bytes) else source.read_bytes())
    except (ValueError, RecursionError) as error:
        where = "The metadata of a table" if isinstance(source, bytes) else source
        raise PackError(f"{where} cannot be read as JSON: {error}. Save the data set anew.") from error
    return found if isinstance(found, dict) else {}


def find_columns(table: Path) -> Columns:
    """Return which columns of a table hold the image and the label.

    Raises:
        PackError: it is unclear.
    """
    schema = _schema(table)
    import pyarrow  # installed, or `_schema` would have raised

    info = _read_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info")
    features = info.get("features") if isinstance(info, dict) else None
    if not features and (table.parent / "dataset_info.json").is_file():
        features = _read_json(table.parent / "dataset_info.json").get("features")
    features = features if isinstance(features, dict) else {}
    kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}
    images = [field.name for field in schema if _holds_images(field)]
    labels = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
    image = _choose("image", _IMAGE_COLUMNS, images, images, table, schema.names)
    label = _choose("label", _LABEL_COLUMNS, schema.names, labels, table, schema.names)
    kind, feature = schema.field(label).type, features.get(label)
    if not pyarrow.types.is_integer(kind):
        raise PackError(
            f"The labels in column {label} of {table} are of type {kind}, not numbers of classes. Convert "
            f"them: dataset.class_encode_column({label!r})."
        )
    return Columns(image, label, tuple(feature.get("names") or ()) if isinstance(feature, dict) else ())


def _holds_images(field: pyarrow.Field) -> bool:
    import pyarrow

    kind = field.type
    if pyarrow.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _choose(
    what: str, names: Sequence[str], known: Sequence[str], likely: Sequence[str], table: Path, columns: Sequence[str]
) -> str:
    named = next((name for name in names if name in known), None)
    if named is not None:
        return named
    if len(likely) == 1:
        return likely[0]
    raise PackError(
        f"It is unclear which column of {table} is the {what}. Its columns: {', '.join(columns)}. Rename the one that "
        f"you mean to `{names[0]}`: dataset.rename_column(..., {names[0]!r})."
    )


def _schema(table: Path) -> pyarrow.Schema:
    try:
        import pyarrow
    except ImportError as error:
        raise PackError(f"{table.name} is read by pyarrow, which is not installed: {install_line('data')}") from error
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if table.suffix == ".parquet":
            return pyarrow.parquet.read_schema(table)
        with pyarrow.memory_map(str(table)) as file:
            return pyarrow.ipc.open_stream(file).schema
    except pyarrow.ArrowException as error:
        raise PackError(f"{table} cannot be read: {error}. Download the data set again.") from error


def count_rows(table: Path) -> int:
    """Return the number of rows of a table, without reading its images."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if table.suffix == ".parquet":
            return int(pyarrow.parquet.read_metadata(table).num_rows)
        with pyarrow.memory_map(str(table)) as file:
            return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(file))
    except pyarrow.ArrowException as error:
        raise PackError(f"{table} cannot be read: {error}. Download the data set again.") from error


def read_rows(table: Path, columns: Columns) -> Iterator[tuple[Any, int | None]]:
    """Return image and label of each row, a few rows in memory at once.

    Raises:
        PackError: the file is damaged.
    """
    import pyarrow

    try:
        for batch in _batches(table, columns):
            for start in range(0, batch.num_rows, _ROWS):
                part = batch.slice(start, _ROWS)
                yield from zip(part[columns.image].to_pylist(), part[columns.label].to_pylist(), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise PackError(f"{table} cannot be read: {error}. Download the data set again.") from error


def _batches(table: Path, columns: Columns) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if table.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(table) as file:
            yield from file.iter_batches(_ROWS, columns=[columns.image, columns.label])
        return
    with pyarrow.memory_map(str(table)) as mapped:
        yield from pyarrow.ipc.open_stream(mapped)
