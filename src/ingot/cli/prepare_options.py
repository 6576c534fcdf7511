"""What `ingot prepare` takes beyond `PrepareOptions`, and what a command line asks for in all."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ingot.config.base import Section
from ingot.data.prepare.options import PrepareOptions, check_options
from ingot.data.sources.input_files import hub_source
from ingot.errors import DataError

# Datasets that GPT-NeoX's prepare_data.py knows by name, and where it fetches them.
NEOX_DATASETS = {
    "enwik8": ["http://data.deepai.org/enwik8.zip"],
    "pile_subset": ["https://the-eye.eu/public/AI/pile/train/00.jsonl.zst"],
    "pile": [f"https://the-eye.eu/public/AI/pile/train/{part:02}.jsonl.zst" for part in range(30)],
}
_TOKENIZER_TYPES = ("GPT2BPETokenizer", "HFGPT2Tokenizer", "HFTokenizer", "HuggingFaceTokenizer")


class PeerOptions(Section):
    """Options of LLM Foundry's, Megatron's and GPT-NeoX's converters that say in other words what to prepare."""

    dataset: str | None = None
    """A Hugging Face hub dataset, such as allenai/c4, or one of NeoX's names: enwik8, pile_subset, pile."""
    data_subset: str | None = None
    """Its configuration, such as en."""
    tokenizer_type: str | None = None
    """GPT2BPETokenizer, HFTokenizer, HuggingFaceTokenizer: how to read vocab_file."""
    vocab_file: Path | None = None
    """vocab.json, or a tokenizer.json."""
    merge_file: Path | None = None
    """merges.txt that belongs to a vocab.json."""
    use_tokenizer_eos: bool = False
    """The default, spelled out."""
    append_eod: bool = False
    """End documents in PREFIX files, as Megatron does."""
    dataset_impl: str = "mmap"
    """GPT-NeoX's name for the indexed format; only mmap exists here."""
    verbose: bool = Field(False, json_schema_extra={"flags": ["-v", "--verbose"]})
    """Also show how long the documents are, and where the longest ones are."""


@dataclass
class PrepareRequest:
    """What a command line of `ingot prepare` asks for."""

    splits: list[PrepareOptions]  # in the order given
    peer: PeerOptions

    def tokenizer(self) -> Any:
        """The tokenizer that the options describe; None keeps text as text."""
        from ingot.data.tokenizer import load_gpt2_tokenizer

        vocab, merges = self.peer.vocab_file, self.peer.merge_file
        if self.peer.tokenizer_type == "GPT2BPETokenizer" or merges is not None:
            if vocab is None or merges is None:
                raise DataError("--tokenizer_type GPT2BPETokenizer needs --vocab_file and --merge_file")
            return load_gpt2_tokenizer(vocab, merges)
        return self.splits[0].tokenizer


def read_request(given: Mapping[str, Any]) -> PrepareRequest:
    """Check the options that were given. What cannot go together is refused before anything is written."""
    peer = PeerOptions(**{name: value for name, value in given.items() if name in PeerOptions.model_fields})
    values = {name: value for name, value in given.items() if name in PrepareOptions.model_fields}
    _check_peer(peer, values)
    _check_tokenizer(peer, values)
    if values.get("output_prefix"):
        values.setdefault("format", "indexed")
        if not peer.append_eod and not peer.use_tokenizer_eos:
            values.setdefault("eos_text", "")  # Megatron and GPT-NeoX end documents only when asked to
    if peer.vocab_file is not None:
        values["tokenizer"] = str(peer.vocab_file)
    names = [n for item in values.get("split") or ["train"] for n in re.split(r"[,\s]+", item.strip(", \t\n"))]
    splits = [check_options({**values, "split": name}) for name in names]
    if values.get("input") and len(names) > 1:
        raise DataError(
            f"--splits {' '.join(names)}: each would get the same documents of --path; "
            "run `ingot prepare` once per split, with that split's files as --path"
        )
    if values.get("output_prefix") and len(names) > 1:
        raise DataError("--output_prefix takes one split; run the command once for each")
    if peer.dataset in NEOX_DATASETS:
        if len(names) > 1 or peer.data_subset:
            raise DataError(
                f"--dataset {peer.dataset}: has no splits or subsets; divide it in training, with NeoX's split"
            )
        return PrepareRequest(
            [check_options({**values, "split": names[0], "input": NEOX_DATASETS[peer.dataset]})], peer
        )
    if peer.dataset:
        sources = [hub_source(peer.dataset, peer.data_subset, name) for name in names]
        splits = [check_options({**values, "split": n, "input": s}) for n, s in zip(names, sources, strict=True)]
    return PrepareRequest(splits, peer)


def _check_peer(peer: PeerOptions, values: Mapping[str, Any]) -> None:
    if bool(values.get("input")) == bool(peer.dataset):
        raise DataError("name what to prepare: files, folders or globs, or --dataset with the name of a hub dataset")
    if (values.get("out_root") is None) == (values.get("output_prefix") is None):
        raise DataError("give either --out FOLDER or --output_prefix (for Megatron's files)")
    if peer.dataset_impl != "mmap":
        raise DataError(f"--dataset_impl {peer.dataset_impl}: only mmap is written, which all readers know")
    if peer.use_tokenizer_eos and values.get("eos_text") is not None:
        raise DataError("--use_tokenizer_eos and --eos_text contradict each other; give one")


def _check_tokenizer(peer: PeerOptions, values: Mapping[str, Any]) -> None:
    name, kind = values.get("tokenizer"), peer.tokenizer_type
    if name is not None and peer.vocab_file is not None:
        raise DataError("--tokenizer and --vocab_file contradict each other; give one")
    if kind is not None and kind not in _TOKENIZER_TYPES:
        known = ", ".join(_TOKENIZER_TYPES)
        raise DataError(f"--tokenizer_type {kind}: known are {known}; or give --tokenizer with any tokenizer.json")
    if kind is not None and name is None and peer.vocab_file is None:
        raise DataError(f"--tokenizer_type {kind} needs --vocab_file with a tokenizer.json, or --tokenizer")
