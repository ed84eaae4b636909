"""data pack|upload|register|attach|show: packs training data, and manages it in Blob Storage."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.cli.verbs import (
    Verbs,
    add_azure_verb,
    add_create_options,
    add_dry_run,
    add_group,
    add_verb,
    add_version_option,
    add_workspace_options,
    client,
    fail,
    from_options,
    make,
    print_text,
)

if TYPE_CHECKING:
    from azure.ai.ml.entities import Data

    from azureml_strategy.data.packing.check import SetCheck
    from azureml_strategy.data.packing.pack import Packing
    from azureml_strategy.data.packing.parts import Part

_NAMED = 5
# Options that are for one kind of data alone.
_IMAGES = ("resize", "quality", "raw", "seed", "max_unreadable")
_TEXT = ("tokenizer", "pattern", "end_of_text", "validation_fraction")
_PACK = """\
Pack images or text into tar shards with an index, for training from a folder, a mount or Blob Storage at full speed.

SRC of images: class folders (SRC/cat/1.jpg, or SRC/train/cat/1.jpg and SRC/val/cat/2.jpg), WebDataset tars, or a data
set of Hugging Face (Parquet or save_to_disk). Without --resize the files are copied as they are. Samples are shuffled.
A packing that was stopped or killed goes on where it was when the same command is typed again.
"""
_PACK_EPILOG = """\
examples:
  azureml-strategy data pack /data/imagenet /data/packed --resize 256
  azureml-strategy data pack /data/books /data/tokens --text --tokenizer tokenizer.json
  azureml-strategy data show /data/packed/train
"""
_EPILOG = """\
examples:
  azureml-strategy data pack /data/imagenet /data/packed --resize 256
  azureml-strategy data upload /data/packed --name imagenet
  azureml-strategy data register azureml://datastores/premium/paths/imagenet/ --name imagenet
  azureml-strategy data attach premium --account fastimages --container training
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "data", "pack, upload, register or show training data")
    _add_pack(group)
    uploaded = "Upload a folder of images or shards, or a file, and register it as a data asset."
    upload = add_azure_verb(group, "upload", _upload, "upload a folder or file", uploaded, _EPILOG)
    upload.add_argument("path", type=Path, metavar="PATH", help="folder or file; .amlignore in it says what stays here")
    _add_asset_options(upload)
    upload.add_argument("--datastore", metavar="NAME", help="where to (default: the workspace's own storage account)")
    registered = "Register what lies in storage already as a data asset."
    register = add_azure_verb(group, "register", _register, "register what is in storage", registered, _EPILOG)
    register.add_argument("path", metavar="ADDRESS", help="azureml://datastores/NAME/paths/FOLDER/ or https://...")
    register.add_argument("--file", action="store_true", help="the address is one file, not a folder")
    _add_asset_options(register)
    _add_attach(group)
    shown = "Show a data asset's versions, or all there is. Show and check a packed set."
    show = add_azure_verb(group, "show", _show, "show data, or check a packed set", shown, _EPILOG)
    what = "of a data asset, all and the datastores by default; or the folder or address of a packed set, to check it"
    show.add_argument("name", nargs="?", metavar="NAME", help=what)
    show.add_argument("--quick", action="store_true", help="of a packed set read only a thousand records, not all")
    add_workspace_options(show)


def _add_pack(group: Verbs) -> None:
    verb = add_verb(group, "pack", _pack, "pack images or text into shards", _PACK, _PACK_EPILOG)
    verb.add_argument("source", type=Path, metavar="SRC", help="folder of images or text")
    verb.add_argument("out", type=Path, metavar="OUT", help="folder of the packed set, made by this")
    verb.add_argument("--shard-size", type=_size, default="100MB", metavar="SIZE", help="of a shard, about (100MB)")
    verb.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a core)")
    images = verb.add_argument_group("images")
    images.add_argument("--resize", type=_count, metavar="N", help="pixels of the shorter side; none is enlarged")
    images.add_argument("--quality", type=_quality, default=90, metavar="Q", help="of resized JPEGs, 1 to 100 (90)")
    images.add_argument("--raw", action="store_true", help="pixels, no JPEGs: some ten times as large, no decoding")
    images.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the samples (0)")
    images.add_argument(
        "--max-unreadable", type=int, default=0, metavar="N", help="images that may be left out as unreadable (0)"
    )
    text = verb.add_argument_group("text")
    text.add_argument("--text", action="store_true", help="SRC is text")
    text.add_argument("--tokenizer", metavar="WHAT", help="tokenizer.json, or folder or hub id of a model; else bytes")
    text.add_argument("--pattern", default="*.txt", metavar="GLOB", help="which files are documents (*.txt)")
    text.add_argument("--end-of-text", metavar="TOKEN", help="the tokenizer's token that follows each document")
    text.add_argument("--validation-fraction", type=_fraction, default=0.05, metavar="F", help="of documents (0.05)")


def _add_asset_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--name", required=True, metavar="NAME", help="of the data asset")
    add_version_option(verb)
    verb.add_argument("--description", metavar="TEXT", help="for its page")
    add_create_options(verb)
    add_workspace_options(verb)


def _add_attach(group: Verbs) -> None:
    attached = "Make a container of a storage account known to the workspace, without the account's key."
    attach = add_azure_verb(group, "attach", _attach, "make a storage account known", attached, _EPILOG)
    attach.add_argument("name", metavar="NAME", help="what to call the datastore")
    attach.add_argument("--account", required=True, metavar="NAME", help="name of the storage account")
    attach.add_argument("--container", required=True, metavar="NAME", help="name of the blob container")
    attach.add_argument("--description", metavar="TEXT", help="for its page")
    add_dry_run(attach)
    add_workspace_options(attach)


def _show_packed(address: str, quick: bool) -> int:
    """Describe and check a packed set, or the sets `train` and `val` of a folder; 1 if something is damaged."""
    from azureml_strategy.data.shard_index import ShardIndexError
    from azureml_strategy.data.storage import StorageError, is_remote

    folder = Path(address).expanduser()
    parts = [folder / name for name in ("train", "val") if (folder / name).is_dir()]
    try:
        return max([_show_set(str(part), quick) for part in parts] or [_show_set(address, quick)])
    except ShardIndexError as error:
        return fail(error)
    except StorageError as error:
        # An address in storage without files of its own may have the sets `train` and `val` below it.
        if is_remote(address) and not address.rstrip("/").endswith(("/train", "/val")):
            with suppress(StorageError):
                return max(_show_set(f"{address.rstrip('/')}/{part}", quick) for part in ("train", "val"))
        return fail(error)


def _show_set(address: str, quick: bool) -> int:
    import asyncio

    from azureml_strategy.data.packing.check import describe
    from azureml_strategy.tracking.tables import render_table

    check = asyncio.run(_check(address, quick))
    print_text(f"{address}\n" + render_table(("what", "is"), describe(check.index), empty=""))
    if not check.indexed:
        print_text("It has no index.npz: it was indexed now, which reads all of it. `data pack` writes one.")
    if not check.damaged:
        print_text(f"{len(check.index.shards):,} shard(s) and {check.records:,} record(s) are as the index says.")
        return 0
    first = "".join(f"\n  {each}" for each in check.damaged[:_NAMED])
    more = len(check.damaged) - _NAMED
    print_text(
        f"{len(check.damaged):,} damaged:{first}"
        + (f"\n  and {more:,} more" if more > 0 else "")
        + "\nCopy these shards again from where the set was packed, or pack it anew."
    )
    return 1


async def _check(address: str, quick: bool) -> SetCheck:
    from azureml_strategy.data.packing.check import check_set
    from azureml_strategy.data.packing.workers import Meter
    from azureml_strategy.data.storage import open_storage

    storage = open_storage(address, os.environ)
    meter: Meter | None = None
    done = 0

    def advance(records: int, total: int) -> None:
        nonlocal meter, done
        meter = meter or Meter("Checking records", total)
        done += records
        meter.show(done)

    try:
        return await check_set(storage, quick, advance)
    finally:
        if meter is not None:
            meter.end()
        await storage.close()


def _pack(options: argparse.Namespace) -> int | None:
    from azureml_strategy.data.folders import DataFolderError
    from azureml_strategy.data.packing.pack import pack
    from azureml_strategy.data.packing.shards import PackError
    from azureml_strategy.data.shard_index import ShardIndexError
    from azureml_strategy.data.tokens import CorpusError

    try:
        indexes = pack(_packing(options))
    except (PackError, DataFolderError, ShardIndexError) as error:
        return fail(error)
    except OSError as error:  # a file that has disappeared, or may not be read
        if error.strerror is None:
            raise
        return fail(f"{error.filename or options.source}: {error.strerror}.")
    except CorpusError as error:  # its message names the keys of a recipe
        return fail(f"{error} (Here, data.pattern is --pattern, data.tokenizer is --tokenizer, and so on.)")
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("stopped by Ctrl-C. The same command goes on where it was.") from interrupt
    for part, index in indexes.items():
        left_out = index.facts.get("unreadable", [])
        for each in left_out[:_NAMED]:
            print(f"azureml-strategy: left out, as it cannot be read: {each}", file=sys.stderr)
        if len(left_out) > _NAMED:
            print(f"azureml-strategy: and {len(left_out) - _NAMED:,} more, which its index names", file=sys.stderr)
        shards = f"{len(index.shards):,} shard(s), {int(index.sizes.sum()) / 1e6:,.1f} MB"
        print_text(f"{options.out / part}: {len(index):,} samples in {shards}, {index.digest}")
    return None


def _packing(options: argparse.Namespace) -> Packing:
    from azureml_strategy.data.packing.pack import Packing
    from azureml_strategy.data.packing.shards import PackError

    source, out = options.source.expanduser(), options.out.expanduser()
    if out.resolve().is_relative_to(source.resolve()):
        raise PackError(f"{out} lies in {source}, and would be packed itself. Give a folder outside of it.")
    unread = _IMAGES if options.text else _TEXT  # options that say nothing about what is packed
    given = [name for name in unread if getattr(options, name) != options.parser.get_default(name)]
    if given:
        what, other = ("text", "images") if options.text else ("images", "text")
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        hint = "Leave it out." if options.text else "Leave it out, or add --text."
        raise PackError(f"{names} is for {other}, but SRC is packed as {what}. {hint}")
    parts, kept = _text(options, source) if options.text else _images(options, source)
    return Packing(
        parts,
        out,
        kept,
        options.shard_size,
        options.seed,
        options.workers or len(os.sched_getaffinity(0)),
        options.max_unreadable,
    )


def _images(options: argparse.Namespace, source: Path) -> tuple[dict[str, Part], dict[str, object]]:
    from azureml_strategy.data.packing.images import ImageForm
    from azureml_strategy.data.packing.sources import find_images

    form = ImageForm(options.resize, options.quality, options.raw)
    kept = {"--resize": options.resize, "--raw": options.raw}
    if options.resize is not None and not options.raw:
        kept["--quality"] = options.quality
    return find_images(source, form), kept


def _text(options: argparse.Namespace, source: Path) -> tuple[dict[str, Part], dict[str, object]]:
    from azureml_strategy.data.packing.tokens import TokenizerChoice, find_text
    from azureml_strategy.data.tokens import find_corpus

    choice = TokenizerChoice(options.tokenizer, options.end_of_text)
    corpus = find_corpus(source, None, options.pattern, os.environ)
    corpus.warn_of_others(options.pattern)
    kept = {"--text": True, "--pattern": options.pattern, "--validation-fraction": options.validation_fraction}
    return find_text(corpus, choice, options.validation_fraction), kept


def _size(text: str) -> int:
    from azureml_strategy.data.readers import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _quality(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 100")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to less than 1")
    return value


def _upload(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.storage import DataRequest, render_upload, survey_data

    survey = survey_data(options.path)
    print(f"{options.path}: {survey}", file=sys.stderr)
    if survey.advice:
        print(f"azureml-strategy: {survey.advice}", file=sys.stderr)
    _make(options, render_upload(from_options(DataRequest, options), options.path))


def _register(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.storage import DataRequest, render_registration

    _make(options, render_registration(from_options(DataRequest, options), options.path, file=options.file))


def _make(options: argparse.Namespace, data: Data) -> None:
    from azureml_strategy.jobs.storage import create_data

    make(options, data, create_data, lambda made: f"azureml:{made.name}:{made.version}  {made.path}")


def _attach(options: argparse.Namespace) -> None:
    from azureml_strategy.jobs.storage import attach_datastore, render_datastore

    datastore = render_datastore(options.name, options.account, options.container, options.description)
    make(options, datastore, attach_datastore, lambda made: f"{made.name}: azureml://datastores/{made.name}/paths/")


def _show(options: argparse.Namespace) -> int | None:
    name = options.name
    if name:
        from azureml_strategy.data.storage import is_remote

        if is_remote(name) or os.sep in name or Path(name).is_dir():  # no data asset, but a packed set
            return _show_packed(name, options.quick)
    from azureml_strategy.jobs.storage import list_data, show_data
    from azureml_strategy.tracking.tables import render_table

    workspace = client(options)
    if name:
        versions = [(each.version, each.type, each.path) for each in show_data(workspace, name)]
        print_text(render_table(("version", "type", "path"), versions, empty=""))
        return None
    assets, datastores = list_data(workspace)
    rows = [(each.name, each.latest_version, each.description) for each in assets]
    print_text(render_table(("data asset", "latest", "description"), rows, empty="There are no data assets."))
    stores = [
        (each.name, getattr(each, "account_name", None), getattr(each, "container_name", None)) for each in datastores
    ]
    print_text("\n" + render_table(("datastore", "account", "container"), stores, empty="There are no datastores."))
    return None
