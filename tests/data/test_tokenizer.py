"""The tokenizer, and that the fast engine never gives other ids than Hugging Face."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, normalizers, pre_tokenizers, processors

from ingot.data.prepare import tokenize_engine as engines
from ingot.data.prepare.tokenize_engine import Engine, Rules, choose_engine, hostile_texts
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import DataError

REAL = Path(__file__).parents[3] / "shared" / "data"
TEXT = "The crucible's heat, 1,234 degrees; naïve café — “Tiegel” 坩堝 😀.\n\n  def melt(ore):\n\treturn ore * 2\n"
FILES = ["20B_tokenizer.json", "gpt2_tokenizer.json", "gpt2-vocab.json", "megatron_fixture/gpt2-tiny-vocab.json"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([TEXT * 20], 400, tmp_path_factory.mktemp("tokenizer"))


def real(name: str) -> Tokenizer:
    if not (REAL / name).is_file():
        pytest.skip(f"{name} is not on this machine")
    return load_tokenizer(REAL / name)


def utf8(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path) -> None:
    first = train_tokenizer([TEXT] * 5, 300, tmp_path / "a")
    second = train_tokenizer([TEXT] * 5, 300, tmp_path / "b")
    assert first.fingerprint() == second.fingerprint()
    assert first.eos_id == 0 and first.vocab_size == 300


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer([TEXT], 100, tmp_path)


def test_saved_and_loaded_it_is_the_same(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint() == trained.fingerprint()
    assert again.eos_id == trained.eos_id
    assert again.decode(again.encode(TEXT)) == TEXT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_saving_writes_the_token_that_ends_a_document_where_only_its_name_told(tmp_path: Path) -> None:
    spelled = {"<|endoftext|>": 0, "a": 1}
    for vocabulary, expected in ((spelled, "<|endoftext|>"), ({"a": 0}, None)):
        plain = Tokenizer(HuggingFace(models.BPE(vocab=vocabulary, merges=[])))
        plain.save(tmp_path)
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()).get("eos_token") == expected
        assert load_tokenizer(tmp_path).eos_id == plain.eos_id == (0 if expected else None)


@pytest.mark.parametrize(("prefix", "named"), [("", ""), ("", "vocab.json"), ("gpt2-", "gpt2-vocab.json")])
def test_the_two_files_of_gpt2_are_found_by_their_folder_or_the_first(
    trained: Tokenizer, tmp_path: Path, prefix: str, named: str
) -> None:
    model = json.loads(trained.json)["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / f"{prefix}vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / f"{prefix}merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    found = load_tokenizer(tmp_path / named)
    assert found.encode(TEXT) == trained.encode(TEXT)
    assert found.eos_id == trained.eos_id and found.decode([found.eos_id]) == "<|endoftext|>"
    assert found.backend.encode("<|endoftext|>").ids == [found.eos_id]  # one token, also within a text


def test_token_bytes_add_up_to_the_bytes_of_the_text(trained: Tokenizer) -> None:
    sizes = trained.token_bytes()
    assert sizes is not None and sizes.dtype == np.int32 and len(sizes) == trained.vocab_size
    assert sizes[trained.encode(TEXT)].sum() == len(TEXT.encode())
    assert sizes[trained.eos_id] == 0


@pytest.mark.parametrize("name", FILES[:3])
def test_token_bytes_of_published_tokenizers_are_exact(name: str) -> None:
    tokenizer = real(name)
    sizes = tokenizer.token_bytes()
    assert sizes is not None
    assert sizes[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


def test_token_bytes_are_unknown_where_tokens_are_not_bytes() -> None:
    assert Tokenizer(HuggingFace(models.WordLevel({"a": 0}, unk_token="a"))).token_bytes() is None


def test_the_config_next_to_it_says_what_ends_a_document(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "e"}}))
    assert load_tokenizer(tmp_path).eos_id == trained.vocab["e"]


def test_a_length_limit_inside_the_file_does_not_cut_documents(trained: Tokenizer, tmp_path: Path) -> None:
    limited = HuggingFace.from_str(trained.json)
    limited.enable_truncation(4)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode(TEXT)) == len(trained.encode(TEXT))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "absent.json", "no such file"),
        (lambda p: p, "no tokenizer.json in this folder"),
        (lambda p: (p / "t.json").write_text("{}") and p / "t.json", "not a tokenizer.json"),
        (lambda p: (p / "vocab.json").write_text("{}") and p / "vocab.json", "needs its vocab.json and its merges.txt"),
        (lambda p: "someone/no-such-tokenizer", "neither in the local Hugging Face cache nor available"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_one_sentence(make, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(make(tmp_path))


# ---- engines ----


@pytest.mark.parametrize("name", [*FILES, "trained"])
def test_the_fast_engine_returns_hugging_faces_ids_on_hostile_unicode(name: str, trained: Tokenizer) -> None:
    tokenizer = trained if name == "trained" else real(name)
    fast = choose_engine(tokenizer)
    assert fast.name == "gigatoken", fast.reason
    texts = [*hostile_texts(tokenizer, count=3000, seed=1), TEXT, "", " ", "\0"]
    ids, lengths = fast.encode(utf8(texts))
    expected = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert lengths.tolist() == [len(e) for e in expected]
    assert ids.tolist() == [i for e in expected for i in e]


def test_a_letter_that_only_one_engine_knows_is_left_to_hugging_face(tmp_path: Path) -> None:
    """The reason for the guard: without it, this very text gets other ids, since `'re` is split off a letter only."""
    tokenizer = train_tokenizer(["we're they're " * 50], 270, tmp_path)
    fast = choose_engine(tokenizer)
    text = "\U00032755're"
    assert fast._encode_fast([text.encode()])[0].tolist() != tokenizer.encode(text)
    assert fast.encode(utf8([text]))[0].tolist() == tokenizer.encode(text)


def test_a_tokenizer_that_the_fast_engine_gets_wrong_falls_back_with_a_reason(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def __init__(self, real):
            self.real = real

        def encode_batch(self, texts, parallel):
            return self.real.encode_batch([t.replace(b"'", b"") for t in texts], parallel=parallel)

    load = engines._load_gigatoken
    monkeypatch.setattr(engines, "_load_gigatoken", lambda tokenizer: Wrong(load(tokenizer)))
    engine = choose_engine(trained)
    assert engine.name == "hf"
    assert "returns other ids than Hugging Face" in engine.reason
    with pytest.raises(DataError, match="does not work with this tokenizer"):
        choose_engine(trained, "gigatoken")


def test_an_unsupported_tokenizer_falls_back_with_a_reason() -> None:
    words = HuggingFace(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    engine = choose_engine(Tokenizer(words))
    assert engine.name == "hf" and engine.reason
    assert engine.encode([b"a b a", b""])[0].tolist() == [0, 1, 0]


def test_normalizing_tokenizers_are_exact_too(trained: Tokenizer) -> None:
    backend = HuggingFace.from_str(trained.json)
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    engine = choose_engine(tokenizer)
    texts = [
        "e\u0301",
        "\u089a\u0302",
        "\u0302\u089a",
        "ﬁ Å",
        "\U0001f468\u200d\U0001f469",
        *hostile_texts(tokenizer, 2000, 3),
    ]
    ids, _ = engine.encode(utf8(texts))
    assert ids.tolist() == [i for text in texts for i in tokenizer.encode(text)]


@pytest.mark.parametrize("name", ["gigatoken", "hf"])
def test_long_documents_are_cut_without_changing_their_ids(
    name: str, trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT * 50
    expected = trained.encode(text)
    monkeypatch.setattr(engines, "_CHUNK_CHARS", 200)
    engine = Engine(Rules.of(trained), name)
    chunks = list(engine._chunks(text))
    assert len(chunks) > 10 and "".join(chunks) == text
    ids, lengths = engine.encode(utf8([text, "a"]))
    assert ids.tolist() == expected + trained.encode("a")
    assert lengths.tolist() == [len(expected), len(trained.encode("a"))]


def test_a_long_document_with_nowhere_to_cut_is_encoded_whole(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_CHUNK_CHARS", 50)
    text = "x" * 1000
    assert Engine(Rules.of(trained), "gigatoken").encode(utf8([text]))[0].tolist() == trained.encode(text)


def test_what_the_tokenizer_puts_around_a_document_is_found(trained: Tokenizer) -> None:
    backend = HuggingFace.from_str(trained.json)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    engine = choose_engine(Tokenizer(backend))
    assert (engine.rules.prefix, engine.rules.suffix) == ([0], [])


def test_the_first_sentence_of_the_hub_is_shown_whole_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    words = " ".join(["nothing"] * 60)

    def refuse(*arguments: object) -> str:
        raise OSError(f"{words}. Another sentence.\nAnother line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(DataError, match=rf"\({words}\); check the connection, or download it elsewhere"):
        load_tokenizer("no-such/tokenizer")


def test_a_hub_id_without_the_hubs_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"no such file or folder, and hub ids need .*: pip install huggingface_hub"):
        load_tokenizer("no-such/tokenizer")
