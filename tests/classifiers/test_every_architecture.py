"""Every architecture of transformers' sequence classifiers against plain transformers.

Each is built small from its own configuration class, saved as transformers saves it, and asked for
one text at a time, always by a copy that has read no other text before.
"""

import contextlib
import copy
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from gpuclassify import DistributedDataClassifier, classify
from gpuclassify.inference.packed.packed_layers import NotPackableError, PackedLayers
from gpuclassify.inference.residency import MODELS
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.loading import check_tensors
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import LOADERS
from tests.models.test_loading import described
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import sample_texts
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import save_model, seeded

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NOT_BUILT = {
    "layoutlmv2": "needs the library detectron2, and reads pictures",
    "mra": "its attention is a CUDA kernel: on a CPU every text gets the same outputs",
}
ENCODER_DECODERS = {"bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"}
# The others are slow only because they are many.
QUICK = ENCODER_DECODERS | {
    "big_bird",  # reads otherwise after a short text
    "gpt_neo",  # attention within a window, of which packing knows nothing
    "jamba",  # a state that runs along the text
    "longformer",
    "qwen3",
    "reformer",  # attention within chunks, and a setting found from the first text
    "xlnet",  # padding changes outputs
    "yoso",
}

WIDTH, INNER, LAYERS, HEADS, HEAD_WIDTH = 32, 64, 2, 4, 8
MOST_TOKENS = 512
NAMES = {
    WIDTH: "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim "
    "true_hidden_size intra_bottleneck_size",
    INNER: "intermediate_size hidden_dim n_inner d_inner encoder_ffn_dim decoder_ffn_dim ffn_dim "
    "d_ff dff feed_forward_size moe_intermediate_size shared_expert_intermediate_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_experts_per_tok num_key_value_heads",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    HEAD_WIDTH: "head_dim d_kv d_head",
    MOST_TOKENS + 2: "max_position_embeddings n_positions",  # some begin after the padding id
    0.2: "initializer_range init_std",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
# Where names mean something else, or sizes must suit each other. None: leave the default.
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
BLOCKS = {"block_size": 8, "num_random_blocks": 1}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
START = {"decoder_start_token_id": 1}
OWN_SIZES = {
    "axk1": LATENT,
    "axk2": LATENT,
    "big_bird": BLOCKS,
    "bigbird_pegasus": BLOCKS,
    "canine": {"num_hash_buckets": 1024},  # its positions end there too
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "esmc": {"num_key_value_heads": 4},
    "funnel": {
        "block_sizes": [1, 1],
        "num_hidden_layers": None,
        "num_decoder_layers": None,
        "max_position_embeddings": None,
    },
    "gemma2": {"sliding_window": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gptj": {"rotary_dim": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 5, "shape_size": 6},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": [16, 16]},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "minicpm3": LATENT,
    "mistral": {"sliding_window": 16},
    "mistral4": LATENT | {"head_dim": 16},
    "modernbert": {"local_attention": 16},
    "mt5": START,
    "perceiver": {
        "d_latents": 32,
        "num_latents": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_next": LINEAR_ATTENTION,
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 16],
        "max_position_embeddings": 512,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "hash_seed": 7,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 20,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": 20,
        "shape_embed_dim": 8,
    },
    "t5": START,
    "umt5": START,
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}
# Fewest words that transformers itself runs: both pool neighbouring tokens.
FEWEST_WORDS = {"canine": 2, "funnel": 1}
# Whose leading layers do not run once for two models: no list of them that is called one by one,
# no padding id, states that are not a row for each text, or that hang on what was read before.
SHARE_NOTHING = {
    *("albert", "big_bird", "bigbird_pegasus", "canine", "funnel", "gemma3", "markuplm"),
    *("modernvbert", "perceiver", "qwen3_5", "reformer", "squeezebert", "ultravbert", "xlnet"),
}

LONG = " ".join(sample_texts(8, seed=3, min_words=60))
TEXTS = [*sample_texts(6, seed=5, max_words=40), "river", "", "a b", LONG, LONG[:800], LONG[50:400]]
assert len(LONG.split()) > MOST_TOKENS / 2


def small_config(config_type, **settings):
    """The configuration class's defaults, with small sizes wherever it has a name for them."""
    default = config_type()
    tokenizer = trained_tokenizer("roberta", documents_of(None))
    ids = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "pad_token_id": 1}
    sizes = {**SIZES, **ids, "eos_token_id": 2}
    known = default.to_dict()
    sizes = {name: size for name, size in sizes.items() if name in known}
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            sizes[name] = small_config(type(part))
    sizes |= OWN_SIZES.get(default.model_type, {}) | settings
    return config_type(**{name: size for name, size in sizes.items() if size is not None})


@pytest.fixture
def write(tmp_path):
    """Writes a small random classifier with three outputs of this ``model_type``."""

    def write(kind, states_length=True, **settings):
        config = small_config(CONFIG_MAPPING[kind], num_labels=3, **settings)
        build = AutoModelForSequenceClassification.from_config
        model = seeded(lambda: build(config).float(), 0)
        save_model(model, tmp_path)
        tokenizer = trained_tokenizer("roberta", documents_of(None))
        most = MOST_TOKENS if states_length else 10**30
        write_tokenizer(tmp_path, "roberta", tokenizer, most, "right")
        return tmp_path

    return write


def expected_outputs(directory, texts):
    """Of each text by plain transformers, in a copy of the model that has read nothing else."""
    tokenizer = plain_tokenizer(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).float().eval()
    rows = (tokenizer(t, truncation=True, return_tensors="pt") for t in texts)
    with torch.inference_mode():
        return np.concatenate([copy.deepcopy(model)(**row).logits.numpy() for row in rows])


def outputs(directory, texts, **options):
    """Of each text by this package, all of them in one frame."""
    classifier = DistributedDataClassifier(
        model=str(directory),
        problem_type="regression",
        score_field="outputs",
        autocast=False,
        max_chars=None,
        **options,
    )
    return stacked(classifier(pd.DataFrame({"text": texts})).outputs)


def assert_agrees(directory, texts=TEXTS, **options):
    """Together in one batch and alone, texts get what plain transformers gives one of them."""
    expected = expected_outputs(directory, texts)
    assert expected.std(0).max() > 0.01, "outputs that do not depend on the text prove nothing"
    assert_close(outputs(directory, texts, **options), expected)
    alone = np.concatenate([outputs(directory, [text], **options) for text in texts])
    assert_close(alone, expected)
    MODELS.evict()


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        if kind not in NOT_BUILT
    ],
)
def test_scores_are_those_of_plain_transformers(write, kind):
    texts = [text for text in TEXTS if len(text.split()) >= FEWEST_WORDS.get(kind, 0)]
    directory = write(kind)
    check_tensors(described(directory))
    assert_agrees(directory, texts)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "xlnet", "t5"])
def test_texts_are_whole_where_neither_model_nor_tokenizer_has_a_length(write, kind):
    settings = {"n_positions": 64} if kind == "t5" else {}
    directory = write(kind, states_length=False, **settings)
    texts = [LONG, "river"]
    assert len(plain_tokenizer(directory)(LONG).input_ids) > 2 * MOST_TOKENS

    assert_agrees(directory, texts)
    if kind == "t5":
        assert outputs(directory, texts, max_seq_length=600).shape == (2, 3)


TABLES_BEHIND_PADDING = (
    "esm",
    "ibert",
    "layoutlmv3",
    "lilt",
    "luke",
    "markuplm",
    "roberta",
    "xmod",
)


@pytest.mark.parametrize(
    ("kind", "most", "settings"),
    [
        *((kind, MOST_TOKENS, {}) for kind in TABLES_BEHIND_PADDING),
        *((kind, MOST_TOKENS + 2, {}) for kind in ("bert", "bart", "nystromformer")),
        ("big_bird", MOST_TOKENS, {}),  # in blocks of 8
        ("big_bird", MOST_TOKENS + 2, {"attention_type": "original_full"}),
        ("big_bird", MOST_TOKENS + 2, {"block_size": 64, "num_random_blocks": 3}),
        ("bigbird_pegasus", MOST_TOKENS + 2, {}),
        ("mpt", 600, {"max_seq_len": 600, "max_position_embeddings": 200}),
    ],
)
def test_texts_end_where_the_table_of_positions_does(write, kind, most, settings):
    directory = write(kind, states_length=False, **settings)
    ids = plain_tokenizer(directory)(" ".join([LONG] * 2)).input_ids
    assert len(ids) > most

    found = outputs(directory, [" ".join([LONG] * 2)])

    cut = torch.tensor([[*ids[: most - 1], ids[-1]]])
    model = AutoModelForSequenceClassification.from_pretrained(directory).float().eval()
    with torch.inference_mode():
        assert_close(found, model(cut).logits.numpy())
    MODELS.evict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind for kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if kind not in NOT_BUILT],
)
def test_models_of_one_trunk_run_in_step_and_right(write, tmp_path, kind):
    """Their last layers and heads differ, and a filter stands between them."""
    first, other = write(kind), tmp_path / "other"
    model = AutoModelForSequenceClassification.from_pretrained(first).float()
    own = list(dict(model.named_parameters(remove_duplicate=False)).values())
    shared = {id(weight) for weight in model.base_model.parameters()}
    with contextlib.suppress(NotPackableError):
        shared -= {id(weight) for weight in PackedLayers(model).layers[-1].parameters()}
    draw = torch.Generator().manual_seed(1)
    for weight in {id(weight): weight for weight in own if id(weight) not in shared}.values():
        weight.data += 0.2 * torch.randn(weight.shape, generator=draw)
    shutil.copytree(first, other)
    save_model(model, other)
    texts = [text for text in TEXTS if len(text.split()) >= FEWEST_WORDS.get(kind, 0)]
    expected = [expected_outputs(directory, texts) for directory in (first, other)]
    certain = torch.tensor(expected[0]).softmax(1).amax(1).numpy()
    ranked = np.sort(certain)[2:-2]
    place = np.diff(ranked).argmax()  # far from all of them
    least = float(ranked[place : place + 2].mean())
    mappers = [
        DistributedDataClassifier(
            model=directory,
            label_field=f"label of {directory.name}",
            score_field=f"scores of {directory.name}",
            min_confidence=least if directory == first else None,
            autocast=False,
            max_chars=None,
        )
        for directory in (first, other)
    ]

    with collected_stats() as stats:
        found = classify(pd.DataFrame({"text": texts}), mappers)

    assert [each.peak_sharing is not None for each in stats] == [kind not in SHARE_NOTHING, False]
    assert found.index.tolist() == np.flatnonzero(certain > least).tolist()
    for mapper, outputs in zip(mappers, expected, strict=True):
        scores = torch.tensor(outputs[certain > least]).softmax(1).numpy()
        assert_close(stacked(found[mapper.options.score_field]), scores)
    MODELS.evict()


@pytest.mark.parametrize("loader", LOADERS)
def test_texts_that_spell_the_end_of_a_text_share_a_batch_with_others(write, loader):
    """Whose heads read the last such token of each text, and refuse unequal counts in a batch."""
    texts = ["a <s>river</s> of it", "an oven", "</s></s>", "two </s> words", *TEXTS[:3]]
    assert_agrees(write("bart"), texts, loader=loader)


def test_outputs_that_are_drawn_anew_each_time_are_refused(write):
    directory = write("reformer", hash_seed=None)
    with pytest.raises(CheckpointError, match=r"same text other outputs each time.*hash_seed"):
        outputs(directory, TEXTS)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_stretch_with_the_longest_row_stretch_for_it_alone(write, kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 2.5]}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | (
        factors | {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    )
    architecture = "phi3" if kind == "longrope" else "llama"
    most = {} if kind == "longrope" else {"max_position_embeddings": 32}
    directory = write(architecture, rope_parameters=rope, **most)
    assert_agrees(directory, max_seq_length=MOST_TOKENS)
    with pytest.raises(ValueError, match="runs texts of other lengths in other ways"):
        outputs(directory, TEXTS[:2], engine="packed")
