"""A model's tokens are those of its own file, whatever class its configuration names."""

import base64
import importlib.util
import json
import struct

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, PreTrainedTokenizerFast, XLNetTokenizer

from gpuclassify.classifiers.fasttext.runner import TokenWords
from gpuclassify.classifiers.questions.prompt_tokens import Prompt, PromptTokenizer
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.tokenizer_backend import load_backend
from gpuclassify.models.tokenizer_files import read_tokenizer
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.retire import PanicError
from tests.replicas.tokenizers import published_files

pytestmark = pytest.mark.contract

FILES = published_files()
TEXTS = json.loads(FILES["deberta/texts.json"])
IDS = json.loads(FILES["deberta/ids.json"])
TRANSFORMERS_4 = json.loads(FILES["transformers_4.json"])
CLASSES = [
    *("DebertaV2Tokenizer", "DebertaV2TokenizerFast", "BertTokenizer", "AlbertTokenizer"),
    *("XLMRobertaTokenizer", "XLNetTokenizer", "T5Tokenizer", "CamembertTokenizer"),
    *("RobertaTokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"),
    *("PreTrainedTokenizerFast", "TokenizersBackend", "BigBirdTokenizer", "RemBertTokenizer"),
    *("MBartTokenizer", "MPNetTokenizer", "DistilBertTokenizer", "FunnelTokenizer"),
    *("BertJapaneseTokenizer", "ByT5Tokenizer", "XLMTokenizer", "TokenizerOfSomebody", None),
]
LLAMA = {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "LlamaTokenizer"}
needs_sentencepiece = pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is None, reason="sentencepiece is not installed"
)


@pytest.fixture
def write(tmp_path):
    """Writes files of the DeBERTa tokenizer, and a configuration with other settings."""

    def write(*names, **settings):
        for name in names:
            (tmp_path / name).write_bytes(FILES[f"deberta/{name}"])
        config = json.loads(FILES["deberta/tokenizer_config.json"]) | settings
        kept = {name: value for name, value in config.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
        return tmp_path

    return write


def ids_of(directory, texts=TEXTS, **settings):
    """By this package, special tokens included; a tokenizer for counts gives as many."""
    tokenizer, counter = (
        TextTokenizer(read_tokenizer("acme/model", directory, is_for_counts=flag, **settings), 512)
        for flag in (False, True)
    )
    assert counter.special_tokens == tokenizer.special_tokens
    assert counter.count(texts).tolist() == tokenizer.count(texts).tolist()
    return [tokens.windows[0].tolist() for tokens in tokenizer.encode(texts)]


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_are_those_of_the_file_whatever_class_is_named(write, name):
    directory = write("tokenizer.json", "special_tokens_map.json", tokenizer_class=name)

    assert ids_of(directory) == IDS["fast"]
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [plain.encode(text).ids for text in TEXTS] == IDS["fast"]


@pytest.mark.parametrize("name", CLASSES)
def test_special_tokens_that_the_file_does_not_know_are_not_declared(write, name):
    directory = write("tokenizer.json")
    config = {} if name is None else {"tokenizer_class": name}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<none>"}))
    (directory / "config.json").write_text(json.dumps({"model_type": "xlnet"}))

    tokenizer = read_tokenizer("acme/model", directory)

    assert ids_of(directory) == IDS["fast"]
    assert tokenizer.pad_token_id is None
    assert {*tokenizer.all_special_ids} <= {*range(901), None}


@pytest.mark.parametrize("names", [None, ["input_ids"], ["input_ids", "token_type_ids"]])
@pytest.mark.parametrize("name", ["XLNetTokenizer", "BertTokenizer", "PreTrainedTokenizerFast"])
def test_segment_ids_are_those_of_the_file_unless_the_model_takes_none(write, name, names):
    directory = write("tokenizer.json", tokenizer_class=name, model_input_names=names)
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.post_processor = TemplateProcessing(single="$A:0 [SEP]:2", special_tokens=[("[SEP]", 2)])
    plain.save(str(directory / "tokenizer.json"))

    batch = TextTokenizer(read_tokenizer("acme/model", directory), 64)(TEXTS)

    if names == ["input_ids"]:
        assert batch.type_ids is None
    else:
        assert batch.type_ids.tolist() == [n for t in TEXTS for n in plain.encode(t).type_ids]


@pytest.mark.parametrize("names", [None, ["input_ids"], ["input_ids", "token_type_ids"]])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, BertTokenizer, XLNetTokenizer])
@pytest.mark.parametrize("has_backend", [False, True])
def test_segment_ids_of_a_tokenizer_that_transformers_5_saved_are_those_it_gives(
    write, kind, names, has_backend
):
    name, backend = kind.__name__, "tokenizers" if has_backend else None
    directory = write(
        "tokenizer.json", tokenizer_class=name, model_input_names=names, backend=backend
    )
    (directory / "config.json").write_text('{"model_type": "bert"}')
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.post_processor = TemplateProcessing(single="$A:0 [SEP]:2", special_tokens=[("[SEP]", 2)])
    plain.save(str(directory / "tokenizer.json"))

    batch = TextTokenizer(read_tokenizer("acme/model", directory), 64)(TEXTS)

    gives = "token_type_ids" in (names or kind.model_input_names)
    is_of_5 = has_backend or name == "TokenizersBackend"
    assert (batch.type_ids is not None) == (gives if is_of_5 else names != ["input_ids"])


def token_of(content, **flags):
    names = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **names, **flags}


RIVER = token_of("river", lstrip=True, special=True)
SMALL = token_of("small", single_word=True, normalized=True)
MASK = token_of("[MASK]", lstrip=True, special=True)


@pytest.mark.parametrize(
    ("file", "settings", "expected"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"901": RIVER, "902": SMALL, "900": MASK}},
            [MASK, RIVER, SMALL],
        ),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": ["river"]},
            [token_of("river", special=True)],
        ),
        (
            "tokenizer_config.json",
            {"extra_special_tokens": ["river"]},
            [token_of("river", special=True)],
        ),
        (
            "tokenizer_config.json",
            {"extra_special_tokens": {"own": "▁market"}},
            [token_of("▁market", special=True)],
        ),
        ("tokenizer_config.json", {"sep_token": "▁small"}, [token_of("▁small", special=True)]),
        ("added_tokens.json", {"river": 901}, [token_of("river", normalized=True)]),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": ["river"]},
            [token_of("river", special=True)],
        ),
    ],
)
@pytest.mark.parametrize(
    "name", ["PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizer", "DebertaV2Tokenizer"]
)
def test_tokens_that_other_files_declare_are_added(write, name, file, settings, expected):
    directory = write("tokenizer.json", tokenizer_class=name, added_tokens_decoder=None)
    settings = settings | ({"tokenizer_class": name} if file == "tokenizer_config.json" else {})
    (directory / file).write_text(json.dumps(settings))
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain.add_tokens([AddedToken(**token) for token in expected])
    texts = [*TEXTS, "a  river, rivers\nsmall smaller  [MASK] ▁market [CLS]", "▁small river"]

    assert ids_of(directory, texts) == [plain.encode(text).ids for text in texts]
    assert ids_of(directory, TEXTS) != IDS["fast"] or "river" not in str(expected)


def test_a_declared_token_with_the_id_of_another_place_is_refused(write):
    directory = write("tokenizer.json", added_tokens_decoder={"950": RIVER})
    with pytest.raises(CheckpointError, match=r"'river' is declared with id 950, and gets 901"):
        read_tokenizer("acme/model", directory)


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2", "xlm-roberta", "llama", "mistral"])
@pytest.mark.parametrize("name", ["BertTokenizer", "LlamaTokenizerFast", None])
def test_tokens_are_those_of_the_file_of_every_architecture(write, model_type, name):
    directory = write("tokenizer.json", tokenizer_class=name)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))

    assert ids_of(directory) == IDS["fast"]


def set_truncation(tokenizer):
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=40, pad_token="[PAD]")


def set_end(tokenizer):
    tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP] [MASK]", special_tokens=[("[SEP]", 2), ("[MASK]", 900)]
    )


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (set_truncation, {}),
        (set_end, {}),
        (set_end, LLAMA),
        (set_end, {"tokenizer_class": "XLMRobertaTokenizer"}),
        (lambda t: t.add_tokens([AddedToken("market", single_word=True)]), {}),
        (lambda t: t, {"do_lower_case": True, "split_by_punct": True}),
        (lambda t: t, {"tokenizer_class": "BertTokenizer", "strip_accents": True}),
        (lambda t: t, {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
        (lambda t: t, {"pad_token": "<nothing>"}),
        (lambda t: t, {"auto_map": {"AutoTokenizer": ["tokenization_acme.Acme", None]}}),
    ],
)  # fmt: skip
def test_what_the_file_says_counts_and_what_it_cuts_and_pads_does_not(write, change, settings):
    directory = write("tokenizer.json", **settings)
    file = str(directory / "tokenizer.json")
    plain = Tokenizer.from_file(file)
    change(plain)
    plain.save(file)
    plain.no_truncation()
    plain.no_padding()

    texts = [*TEXTS, "a [MASK] b [SEP]", "market marketing"]
    assert ids_of(directory, texts) == [plain.encode(text).ids for text in texts]


def test_what_a_configuration_declares_is_kept(write):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    directory = write(
        "tokenizer.json",
        tokenizer_class="BertTokenizer",
        model_max_length=77,
        padding_side="left",
        truncation_side="left",
        chat_template=template,
    )

    tokenizer = read_tokenizer("acme/model", directory)

    assert (tokenizer.model_max_length, tokenizer.padding_side) == (77, "left")
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.eos_token_id) == (0, 900, 2)
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello[SEP]"
    kept = TextTokenizer(tokenizer, 4)(["The river kept a small market"]).ids
    assert kept.tolist() == [1, *IDS["fast"][0][5:7], 2] or len(kept) == 4
    assert read_tokenizer("acme/model", directory, model_max_length=9).model_max_length == 9


@needs_sentencepiece
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join([case["class"], *map(str, case["settings"].values())]))
        for case in TRANSFORMERS_4["cases"]
    ],
)
def test_without_the_file_tokens_are_those_that_transformers_4_gave(tmp_path, case):
    for name, source in case["files"].items():
        content = FILES.get(f"deberta/{source}") or FILES[f"other/{source}"]
        (tmp_path / name).write_bytes(content)
    config = {"tokenizer_class": case["class"], **case["settings"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": case["model_type"]}))

    tokenizer = TextTokenizer(read_tokenizer("acme/model", tmp_path), 512)
    found = tokenizer.encode(TRANSFORMERS_4["texts"])

    assert [text.windows[0].tolist() for text in found] == case["ids"]
    types = [[ids.tolist() for ids in text.type_ids or []] for text in found]
    assert types == [[ids] for ids in case["types"]] if "types" in case else not any(types)


@needs_sentencepiece
def test_sentencepiece_models_keep_their_normalisation(write):
    directory = write("spm.model", "special_tokens_map.json", "added_tokens.json")

    assert ids_of(directory) == IDS["fast"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": b"{}"}, r"tokenizer of acme/model loads from .*because of \w+: .*"),
        ({"tokenizer.json": b"[", "spm.model": b""}, r"because of \w+: tokenizer\.json is damaged"),
        ({"spm.model": b"none"}, r"because of \w+: .*([Pp]ars|not|Extra)"),
        ({"vocab.json": b"[1]", "merges.txt": b""}, r"because of \w+: "),
        ({}, r"none of \[.*.*\] is there"),
    ],
    ids=["wrong", "cut", "no model", "list", "none"],
)
@needs_sentencepiece
def test_a_tokenizer_that_does_not_load_says_why(tmp_path, files, words):
    names = {"spm.model": "DebertaV2Tokenizer", "vocab.json": "GPT2Tokenizer"}
    config = {"tokenizer_class": names.get(next(iter(files), ""), "BertTokenizer")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=words):
        read_tokenizer("acme/model", tmp_path)


@needs_sentencepiece
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "TokenizerOfSomebody"])
def test_a_sentencepiece_file_needs_a_class_that_says_its_steps(tmp_path, name):
    (tmp_path / "tokenizer.model").write_bytes(FILES["other/llama.model"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))

    with pytest.raises(CheckpointError, match=r"tokenizer\.model does not say .*LlamaTokenizer"):
        read_tokenizer("acme/model", tmp_path)


SPECIAL = {"SpecialToken": {"id": "[X]", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [SPECIAL], "pair": [], "special_tokens": {}}
BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
HOSTILE = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"post_processor": TEMPLATE},
    {
        "post_processor": {
            **TEMPLATE,
            "single": [SPECIAL] * 10_000,
            "special_tokens": {"[X]": {"id": "[X]", "ids": [1] * 9_999, "tokens": ["x"] * 9_999}},
        }
    },
    {"model": {**BPE, "continuing_subword_prefix": "#" * 9}},
]


@pytest.mark.parametrize("change", HOSTILE)
@pytest.mark.parametrize(
    "load",
    [
        lambda file: read_tokenizer("acme/model", file.parent),
        lambda file: load_backend(file, "tokenizer.json"),
        lambda file: load_backend(file.read_text(), "tokenizer.json"),
        lambda file: TokenWords(file),
    ],
    ids=["directory", "file", "text", "fasttext"],
)
def test_a_tokenizer_that_makes_the_library_panic_is_refused(write, change, load):
    file = write("tokenizer.json") / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load(file)


def test_padding_that_fits_into_no_memory_is_ignored(write):
    directory = write("tokenizer.json")
    file = directory / "tokenizer.json"
    own = {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]", "pad_to_multiple_of": None}
    padding = {"strategy": {"Fixed": 2**50}, "direction": "Right", **own}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding": padding}))

    assert ids_of(directory) == IDS["fast"]


@pytest.mark.parametrize(("rows", "text"), [(100, "hello"), (256, "天")])
def test_a_text_that_makes_the_library_panic_ends_with_an_error(write, rows, text):
    file = write("tokenizer.json") / "tokenizer.json"
    table = np.zeros(rows, dtype=np.uint32)
    table[229:230] = 1 << 28 | 229  # what begins with this byte goes on behind the table's end
    content = struct.pack("<I", table.nbytes) + table.tobytes() + b"\0"
    charsmap = base64.b64encode(content).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    whole = Prompt(("a", ""), ("text",), has_special_tokens=False)
    ways = [
        lambda tokenizer: TextTokenizer(tokenizer, 64)([text]),
        lambda tokenizer: TextTokenizer(tokenizer, 64, pairing=("a", "only_second"))([text]),
        lambda tokenizer: PromptTokenizer(tokenizer, whole, 64)([(text,)]),
        lambda tokenizer: PromptTokenizer(tokenizer, whole, 64).encode([text]),
        lambda tokenizer: PromptTokenizer(tokenizer, whole, 64).windows(text, 2),
        lambda tokenizer: TokenWords(file)([text]),
    ]

    for way in ways:
        with pytest.raises(PanicError, match=r"the tokenizers library panicked .* out of bounds"):
            way(read_tokenizer("acme/model", file.parent))


def test_a_configuration_that_is_refused_is_named(write):
    directory = write("tokenizer.json")
    (directory / "tokenizer_config.json").write_text("{")

    with pytest.raises(CheckpointError, match="JSONDecodeError: Expecting property name"):
        read_tokenizer("acme/model", directory)


@pytest.mark.parametrize("length", ["-5", "NaN", '"512"', "[]", "9" * 5_000, "[" * 50_000])
def test_a_length_that_is_no_number_of_tokens_is_refused(write, length):
    file = write("tokenizer.json", model_max_length="<length>") / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"<length>"', length))

    with pytest.raises(CheckpointError, match="no tokenizer of acme/model loads from its files"):
        read_tokenizer("acme/model", file.parent)


@pytest.mark.parametrize("missing", ["sentencepiece", "protobuf"])
def test_the_libraries_for_sentencepiece_models_are_named_where_they_are_missing(
    write, missing, monkeypatch
):
    monkeypatch.setattr(f"transformers.utils.is_{missing}_available", lambda: False)

    with pytest.raises(
        CheckpointError, match=r"spm.model and no tokenizer.json.*\[sentencepiece\]"
    ):
        read_tokenizer("acme/model", write("spm.model"))
    assert ids_of(write("spm.model", "tokenizer.json")) == IDS["fast"]
