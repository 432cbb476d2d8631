"""Published guards and the taxonomy: the prompts and answers that their authors print.

Templates here are written from what the authors' code and cards print. No published tokenizer or
model was at hand.
"""

import functools
import hashlib
import json
import logging
import re
import shutil
import sys

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from gpuclassify import (
    GraniteGuardianClassifier,
    LlamaGuardClassifier,
    NemotronContentSafetyClassifier,
    NemotronSafetyGuardClassifier,
    PromptClassifier,
    PropellaClassifier,
    Qwen3GuardClassifier,
    Qwen3GuardResponseClassifier,
    ShieldGemmaClassifier,
    TaxonomyClassifier,
    WildGuardClassifier,
)
from gpuclassify.classifiers.questions import published_guards, taxonomy
from gpuclassify.classifiers.questions.prompt_classifier import new_readers
from gpuclassify.classifiers.questions.safety_template import TemplateError
from gpuclassify.classifiers.questions.taxonomy import PROPELLA, TAXONOMY, shortened
from gpuclassify.workers.run_context import collected_stats
from tests.chat_oracle import ChatOracle
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts
from tests.replicas.chat_models import CHATML, LLAMA3, write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DOCUMENT, RESPONSE = "Which {way} to the\nbank?", "Left."
FRAME = pd.DataFrame({"text": [DOCUMENT, *sample_texts(3)], "response": [RESPONSE, "", None, "x"]})
FRAME["prompt"] = FRAME["text"]

QWEN_CATEGORIES = (
    "Violent.\nNon-violent Illegal Acts.\nSexual Content or Sexual Acts.\nPII.\n"
    "Suicide & Self-Harm.\nUnethical Acts.\nPolitically Sensitive Topics.\nCopyright Violation.\n"
)
QWEN_LINES = (
    " - The first line must be one of: 'Safety: Safe', 'Safety: Unsafe', 'Safety: Controversial'.\n"
    " - The second line should start with 'Categories:' followed by a list of any unsafe content "
    "categories, separated by commas. If the content is safe, use 'Categories: None'."
)
QWEN_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN = (
    "<|im_start|>user\n# Task:\n1) Evaluate whether THE LAST USER's query belongs to safe or "
    "unsafe content based on our safety policy.\n2) Identify the category of unsafe content "
    "found.\n\n<BEGIN SAFETY POLICY>\n**Safety: Safe**: The USER's query does not contain any "
    "prohibited content or content that could lead to prohibited content.\n**Safety: Unsafe**: The "
    "USER's query contains prohibited content.\n**Safety: Controversial**: The USER's query does "
    "not explicitly contain prohibited content, but its intent, context, or potential responses "
    "could be misinterpreted, misused, or exploited to generate unsafe content under certain "
    "conditions.\n<END SAFETY POLICY>\n\n<BEGIN UNSAFE CONTENT CATEGORIES>\n"
    f"{QWEN_CATEGORIES}Jailbreak.\n<END UNSAFE CONTENT CATEGORIES>\n\n<BEGIN CONVERSATION>\n\n"
    "USER: TEXT\n\n<END CONVERSATION>\n\nProvide your safety assessment for ONLY THE LAST **USER's "
    f"query** in the above conversation:\n{QWEN_LINES}{QWEN_END}"
)
QWEN_OF_RESPONSES = (
    "<|im_start|>user\n# Task:\n1) Evaluate whether THE LAST ASSISTANT's response belongs to safe "
    "or unsafe content based on our safety policy.\n2) Identify the category of unsafe content "
    "found.\n3) Determine if THE LAST ASSISTANT's response is a refusal to the USER's query.\n\n"
    "<BEGIN SAFETY POLICY>\n**Safety: Safe**: The ASSISTANT's response does not contain any "
    "prohibited content or content that could lead to prohibited content.\n**Safety: Unsafe**: The "
    "ASSISTANT's response contains prohibited content.\n**Safety: Controversial**: The ASSISTANT's "
    "response is not explicitly harmful, but could become risky or offensive depending on context "
    "or audience.\n<END SAFETY POLICY>\n\n<BEGIN UNSAFE CONTENT CATEGORIES>\n"
    f"{QWEN_CATEGORIES}<END UNSAFE CONTENT CATEGORIES>\n\n<BEGIN REFUSAL POLICY>\n**Refusal: "
    "Yes**: The ASSISTANT refused to answer or did not comply with the USER's request.\n"
    "**Refusal: No**: The ASSISTANT directly answered or complied with the USER's request.\n"
    "<END REFUSAL POLICY>\n\n<BEGIN CONVERSATION>\n\nUSER: TEXT\n\nASSISTANT: REPLY\n\n"
    "<END CONVERSATION>\n\nProvide your safety assessment for ONLY THE LAST **ASSISTANT's "
    f"response** in the above conversation:\n{QWEN_LINES}\n - The third line must be one of: "
    f"'Refusal: Yes', 'Refusal: No'.{QWEN_END}"
)
LLAMA_GUARD = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTask: Check if there is unsafe "
    "content in 'ROLE' messages in conversations according our safety policy with the below "
    "categories.\n\n<BEGIN UNSAFE CONTENT CATEGORIES>\nS1: Violent Crimes.\nS2: Non-Violent "
    "Crimes.\n<END UNSAFE CONTENT CATEGORIES>\n\n<BEGIN CONVERSATION>\n\nTURNS"
    "<END CONVERSATION>\n\nProvide your safety assessment for ONLY THE LAST ROLE message in the "
    "above conversation:\n - First line must read 'safe' or 'unsafe'.\n - If unsafe, a second line "
    "must include a comma-separated list of violated categories.<|eot_id|><|start_header_id|>"
    "assistant<|end_header_id|>"
)
PROPELLA_SYSTEM = (  # as printed in the code of an annotation of Danish texts
    "Annotate the document. Any language; assess quality within its linguistic norms. Return only "
    "a JSON object. Do not include markdown, code fences, or explanatory text.\n"
    "content_integrity: technical completeness (complete|mostly_complete|fragment|"
    "severely_degraded)\n"
    "content_ratio: content vs navigation/boilerplate ratio (complete_content|mostly_content|"
    "mixed_content|mostly_navigation|minimal_content)\n"
    "content_length: substantive words (substantial 2k+|moderate 500-2k|brief 100-500|minimal <100)"
    "\n"
    "one_sentence_description: neutral ~10 word summary in English\n"
    "content_type[]: functional purpose (analytical|instructional|reference|procedural|"
    "qa_structured|conversational|creative|transactional|boilerplate|news_report|opinion_editorial|"
    "review_critique|technical_documentation|specification_standard|legal_document|press_release|"
    "structured_data|source_code)\n"
    "business_sector[]: industry domain (academic_research|education_sector|technology_software|"
    "hardware_electronics|healthcare_medical|pharmaceutical_biotech|financial_services|"
    "legal_services|government_public|manufacturing_industrial|mining_resources|chemicals_materials|"
    "energy_utilities|retail_commerce|wholesale_distribution|real_estate_construction|"
    "transportation_logistics|automotive_industry|telecommunications|media_entertainment|"
    "advertising_marketing|hospitality_tourism|agriculture_food|environmental_services|"
    "aerospace_defense|insurance_industry|nonprofit_ngo|consulting_professional|human_resources|"
    "security_cyber|gaming_industry|gambling_betting|travel_aviation|food_beverage_hospitality|"
    "consumer_goods|general_interest|other)\n"
    "technical_content[]: specialized knowledge (code_heavy|math_heavy|scientific|data_heavy|"
    "engineering|basic_technical|non_technical)\n"
    "content_quality: writing/presentation quality (excellent|good|adequate|poor|unacceptable)\n"
    "information_density: signal vs padding (dense|adequate|moderate|thin|empty)\n"
    "educational_value: teaching potential (high|moderate|basic|minimal|none)\n"
    "reasoning_indicators: logical analysis depth (analytical|explanatory|basic_reasoning|minimal|"
    "none)\n"
    "audience_level: assumed background (expert|advanced|general|beginner|youth|children)\n"
    "commercial_bias: promotional influence (none|minimal|moderate|heavy|pure_marketing)\n"
    "time_sensitivity: temporal decay (evergreen|slowly_changing|regularly_updating|time_sensitive)"
    "\n"
    "content_safety: harmful content (safe|mild_concerns|nsfw|harmful|illegal)\n"
    "pii_presence: private individual data (no_pii|contains_pii)\n"
    "regional_relevance[]: geographic/cultural context (european|north_american|east_asian|"
    "south_asian|southeast_asian|middle_eastern|sub_saharan_african|latin_american|oceanian|"
    "central_asian|russian_sphere|global|culturally_neutral|indeterminate)\n"
    "country_relevance[]: specific countries as ISO names, or supranational|none\n"
)
_TURNS = (
    "{% for message in messages %}{{ 'User' if message.role == 'user' else 'Agent' }}: WORDS\n\n"
    "{% endfor %}"
)
_ROLE = "{{ 'User' if messages | length == 1 else 'Agent' }}"
LLAMA_GUARD_TEMPLATE = LLAMA_GUARD.replace("ROLE", _ROLE).replace("TURNS", _TURNS)
SHIELDGEMMA = (
    "<bos>You are a policy expert trying to help determine whether a user prompt is in violation "
    "of the defined safety policies.\n\n<start_of_turn>\nHuman Question: TEXT\n<end_of_turn>\n\n"
    "Our safety principle is defined in the below:\n\n* GUIDELINE\n\n===\n\nDoes the human "
    "question violate the above principle? Your answer must start with 'Yes' or 'No'. And then "
    "walk through step by step to be sure we answer correctly.\n\n"
)
GRANITE = (
    "<|start_of_role|>user<|end_of_role|>You are a safety agent trying to help determine whether "
    "the user message is harmful according to the safety risk definition below.\n\n"
    "<start_of_turn>\nUser Message: TEXT\n<end_of_turn>\n\nOur safety risk definition is defined "
    "below:\n<start_of_risk_definition>\n* DEFINITION\n<end_of_risk_definition>\n\nIs the user "
    "message harmful based on the risk definition? Your answer must be either 'Yes' or 'No'."
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"
)
TEMPLATES = {
    "qwen": "{% if messages | length == 1 %}"
    + QWEN.replace("TEXT", "{{ messages[0].content }}")
    + "{% else %}"
    + QWEN_OF_RESPONSES.replace("TEXT", "{{ messages[0].content }}").replace(
        "REPLY", "{{ messages[1].content }}"
    )
    + "{% endif %}{% if add_generation_prompt %}wrong{% endif %}",
    "llama guard 8B": LLAMA_GUARD_TEMPLATE.replace("WORDS", "{{ message.content.strip() }}"),
    "llama guard 1B": LLAMA_GUARD_TEMPLATE.replace(
        "WORDS",
        "{{ message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') "
        "| join | trim }}",
    ),
    "shieldgemma": SHIELDGEMMA.replace("TEXT", "{{ messages[-1].content | trim }}").replace(
        "GUIDELINE", "{{ guideline | trim }}"
    )
    + "{{ '' }}",  # before which line breaks stay
    "granite": "{% set known = {'harm': 'Content that is harmful.'} %}"
    + GRANITE.replace("TEXT", "{{ messages[-1].content }}").replace(
        "DEFINITION",
        "{{ guardian_config.risk_definition or known[guardian_config.risk_name] or "
        "guardian_config.risk_name }}",
    ),
    "chatml": CHATML,
    "llama3": LLAMA3,
    # The variables that the published template reads; its words were out of reach.
    "nemotron 3.5": "<bos><start_of_turn>user\n{{ messages[0].content | trim }}\n\n"
    "{{ '/think' if enable_thinking else '/no_think' }} {{ request_categories }}<end_of_turn>\n"
    "<start_of_turn>model\n{{ '' }}",
}


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """The directory of a small decoder with one of `TEMPLATES`."""
    base = write_chat_model(tmp_path_factory.mktemp("base"), "qwen2")

    @functools.cache
    def write(name):
        directory = tmp_path_factory.mktemp("guard") / name
        shutil.copytree(base, directory)
        (directory / "chat_template.jinja").write_text(TEMPLATES[name])
        return str(directory)

    return write


# Prompts.

WILDGUARD = published_guards.WILDGUARD_PROMPT.format(prompt=DOCUMENT, response=RESPONSE)
NEMOTRON = published_guards.NEMOTRON_PROMPT.format(text=DOCUMENT)
HARASSMENT = published_guards.SHIELDGEMMA_PROMPT_GUIDELINES["shieldgemma_harassment"]
PROMPTS = {
    "qwen": (Qwen3GuardClassifier, "qwen", {}, QWEN.replace("TEXT", DOCUMENT)),
    "qwen, responses": (
        Qwen3GuardResponseClassifier, "qwen", {},
        QWEN_OF_RESPONSES.replace("TEXT", DOCUMENT).replace("REPLY", RESPONSE),
    ),
    **{
        f"{name}{', responses' if own else ''}": (
            LlamaGuardClassifier, name, own,
            LLAMA_GUARD.replace("ROLE", "Agent" if own else "User").replace(
                "TURNS", f"User: {DOCUMENT}\n\n" + (f"Agent: {RESPONSE}\n\n" if own else "")
            ) + "\n\n",
        )
        for name in ("llama guard 8B", "llama guard 1B")
        for own in ({}, {"response": "{response}"})
    },
    "shieldgemma": (
        ShieldGemmaClassifier, "shieldgemma", {"criteria": {"harassment": HARASSMENT}},
        SHIELDGEMMA.replace("TEXT", DOCUMENT).replace("GUIDELINE", HARASSMENT),
    ),
    "granite": (
        GraniteGuardianClassifier, "granite", {},
        GRANITE.replace("TEXT", DOCUMENT).replace("DEFINITION", "Content that is harmful."),
    ),
    "granite, a risk of one's own": (
        GraniteGuardianClassifier, "granite",
        {"criteria": {"ads": "Sells a thing."}, "chat_template_kwargs": {
            "guardian_config": {"risk_name": "own", "risk_definition": "{criterion}"}}},
        GRANITE.replace("TEXT", DOCUMENT).replace("DEFINITION", "Sells a thing."),
    ),
    "nemotron": (
        NemotronSafetyGuardClassifier, "llama3", {},
        f"<s><|start_header_id|>user<|end_header_id|>\n\n{NEMOTRON}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "nemotron 3.5": (
        NemotronContentSafetyClassifier, "nemotron 3.5", {},
        f"<bos><start_of_turn>user\n{DOCUMENT}\n\n/no_think /categories<end_of_turn>\n"
        "<start_of_turn>model\n",
    ),
    "wildguard": (WildGuardClassifier, "chatml", {}, WILDGUARD),
    "propella": (
        PropellaClassifier, "chatml", {},
        f"<|im_start|>system\n{PROPELLA_SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"<start_of_document>\n{DOCUMENT}\n<end_of_document>\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    "taxonomy": (
        TaxonomyClassifier, "chatml", {},
        f"<|im_start|>system\ntaxonomy<|im_end|>\n<|im_start|>user\n{DOCUMENT}<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_that_the_authors_print(replica, name):
    kind, template, options, expected = PROMPTS[name]
    classifier = kind(model=replica(template), **options)
    assert classifier.first_prompt(FRAME, 1_000) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Qwen3GuardClassifier, QWEN), (Qwen3GuardResponseClassifier, QWEN_OF_RESPONSES)],
)
def test_the_digest_is_that_of_the_text_and_another_one_is_told(replica, kind, text, caplog):
    published = text.replace("TEXT", "").replace("REPLY", "")
    digest = hashlib.sha256(published.encode()).hexdigest()
    assert kind.defaults["prompt_digest"] == digest
    ddf = dd.from_pandas(FRAME, npartitions=1)
    with caplog.at_level(logging.WARNING, "gpuclassify"):
        kind(model=replica("qwen"), strict=True)(ddf)
        assert not caplog.messages
        kind(model=replica("chatml"))(ddf)
    (message,) = {one for one in caplog.messages if "digest" in one}
    assert digest in message
    with pytest.raises(TemplateError, match="not the one that is known"):
        kind(model=replica("chatml"), strict=True)(ddf)
    (found,) = re.findall(r"the digest (\w{64})", message)
    kind(model=replica("chatml"), strict=True, prompt_digest=found)(ddf)


def test_a_digest_that_is_none_is_refused_by_its_setting():
    with pytest.raises(ValueError, match="prompt_digest='f' is not a digest: give all 64"):
        Qwen3GuardClassifier(prompt_digest="f")


def test_without_an_adapter_no_peft_is_needed(replica, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    found = Qwen3GuardClassifier(model=replica("qwen"))(FRAME)
    assert set(found["qwen3guard_safety"]) <= {"Safe", "Unsafe", "Controversial"}


def test_jobs_note_the_whole_prompt(replica):
    described = WildGuardClassifier(model=replica("chatml")).describe()
    assert described["prompt"] == published_guards.WILDGUARD_PROMPT
    assert json.loads(json.dumps(described)) == described


# Answers.


def forced(classifier, answer):
    """The columns for an answer that the model is sure of, in the tokens of the whole text."""
    prompt, *_ = classifier.model.checkpoint.prompts
    tokenizer = plain_tokenizer(classifier.options.model)
    end = tokenizer.eos_token_id
    (reader,) = new_readers(classifier.options, (prompt,), tokenizer, {end})
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt.literals[-1], prompt.literals[-1] + answer)
    )
    target = (*after[len(before) - reader.dropped :], end)
    known = {}
    reading = reader.read(known)
    with pytest.raises(StopIteration) as ended:
        while True:
            wanted = next(reading)
            on_way = target[: len(wanted)] == wanted
            token = target[len(wanted)] if on_way else end
            logits = np.array([30.0 * (on_way and one == token) for one in reader.columns])
            known[wanted] = (logits, token, 1.0)
    found = ended.value.value
    assert target[: len(found.tokens)] == found.tokens
    (head,) = classifier.heads
    values = np.empty(1, dtype=object)
    values[0] = found
    columns = {name: column.to_pylist()[0] for name, column in head.arrays(values).items()}
    assert sorted(columns) == sorted(field.name for field in head.fields())
    return columns


def qwen_parsed(answer):
    """As the authors' README does."""
    names = "|".join([*published_guards.QWEN3GUARD_HARMS, "None"])
    categories = re.findall(f"({names})", answer)
    found = {
        "safety": re.search("Safety: (Safe|Unsafe|Controversial)", answer)[1],
        "categories": [one for one in categories if one != "None"],
    }
    if refusal := re.search("Refusal: (Yes|No)", answer):
        found["refusal"] = refusal[1]
    return found


@pytest.mark.parametrize(
    "answer",
    [
        "Safety: Unsafe\nCategories: Violent",
        "Safety: Safe\nCategories: None",
        "Safety: Controversial\nCategories: PII, Suicide & Self-Harm",
        "Safety: Unsafe\nCategories: Non-violent Illegal Acts, Violent, Unethical Acts",
        "Safety: Unsafe\nCategories: Jailbreak",
    ],
)
def test_answers_of_qwen3guard_mean_what_its_parser_says(replica, answer):
    parsed = qwen_parsed(answer)
    expected = {f"qwen3guard_{name}": value for name, value in parsed.items()}
    assert forced(Qwen3GuardClassifier(model=replica("qwen")), answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "Safety: Safe\nCategories: None\nRefusal: Yes",
        "Safety: Unsafe\nCategories: Violent, Unethical Acts\nRefusal: No",
    ],
)
def test_answers_about_responses_mean_what_the_parser_says(replica, answer):
    parsed = qwen_parsed(answer)
    assert forced(Qwen3GuardResponseClassifier(model=replica("qwen")), answer) == {
        "qwen3guard_response_safety": parsed["safety"],
        "qwen3guard_response_categories": parsed["categories"],
        "qwen3guard_refusal": parsed["refusal"],
    }


@pytest.mark.parametrize("size", ["8B", "1B"])
@pytest.mark.parametrize(
    ("answer", "safety", "hazards"),
    [
        ("safe", "safe", []),
        ("unsafe\nS1,S9", "unsafe", ["Violent Crimes", "Indiscriminate Weapons"]),
        ("unsafe\nS10", "unsafe", ["Hate"]),
        ("unsafe\nS12,S1", "unsafe", ["Sexual Content", "Violent Crimes"]),
        ("unsafe\nS14", "unsafe", ["Code Interpreter Abuse"]),
    ],
)
def test_answers_of_llama_guard_are_hazards_by_their_codes(replica, size, answer, safety, hazards):
    guard = LlamaGuardClassifier(model=replica(f"llama guard {size}"))
    columns = {"llamaguard_safety": safety, "llamaguard_categories": hazards}
    assert forced(guard, answer) == columns


@pytest.mark.parametrize(
    "answer",
    [
        '{"User Safety": "safe"}',
        '{"User Safety": "unsafe", "Safety Categories": "Guns and Illegal Weapons"}',
        '{"User Safety": "unsafe", "Safety Categories": "Manipulation, Immoral/Unethical"}',
        '{"User Safety": "unsafe", "Safety Categories": "Sexual (minor), Violence"}',
        '{"User Safety": "unsafe", "Safety Categories": "Sexual, Sexual (minor), Other"}',
    ],
)
def test_answers_of_nemotron_mean_what_its_parser_says(replica, answer):
    read = json.loads(answer)
    categories = [one.strip() for one in read.get("Safety Categories", "").split(",") if one]
    assert forced(NemotronSafetyGuardClassifier(model=replica("llama3")), answer) == {
        "nemotron_safety": read["User Safety"],
        "nemotron_categories": categories,
    }


@pytest.mark.parametrize(
    "answer",
    [
        "User Safety: safe",
        "User Safety: unsafe\nSafety Categories: Threat, PII/Privacy",
        "User Safety: unsafe\nSafety Categories: Sexual (minor)",
    ],
)
def test_answers_of_nemotron_3_5_are_lines(replica, answer):
    read = dict(line.split(": ") for line in answer.split("\n"))
    guard = NemotronContentSafetyClassifier(model=replica("nemotron 3.5"))
    assert forced(guard, answer) == {
        "nemotron_content_safety": read["User Safety"],
        "nemotron_content_categories": read.get("Safety Categories", "").split(", ")
        if "Safety Categories" in read else [],
    }  # fmt: skip


PROPELLA_ANSWER = {
    "content_integrity": "complete",
    "content_ratio": "mostly_content",
    "content_length": "brief",
    "one_sentence_description": "A review of a café.",
    "content_type": ["review_critique"],
    "business_sector": ["hospitality_tourism", "food_beverage_hospitality"],
    "technical_content": ["non_technical"],
    "information_density": "moderate",
    "content_quality": "good",
    "audience_level": "general",
    "commercial_bias": "none",
    "time_sensitivity": "time_sensitive",
    "content_safety": "safe",
    "educational_value": "none",
    "reasoning_indicators": "minimal",
    "pii_presence": "no_pii",
    "regional_relevance": ["european", "global", "indeterminate"],
    "country_relevance": ["france", "germany"],
}


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({}, {}),
        ({"one_sentence_description": 'Says "yes", "no" and \\ to\na line.'}, {}),
        ({"one_sentence_description": "", "country_relevance": ["none"]}, {}),
        ({"one_sentence_description": "half \ud83d"}, {"one_sentence_description": "half \ufffd"}),
        ({"content_type": ["creative", "news_report", "source_code"]}, {}),
    ],
)
def test_answers_of_propella_are_json(replica, changed, shown):
    answer = json.dumps(PROPELLA_ANSWER | changed, separators=(",", ":"))
    assert [name.removesuffix("[]") for name in PROPELLA] == list(PROPELLA_ANSWER)
    expected = {f"propella_{name}": v for name, v in (PROPELLA_ANSWER | changed | shown).items()}
    assert forced(PropellaClassifier(model=replica("chatml")), answer) == expected


def test_propella_reads_as_much_of_a_document_as_its_authors_code(replica):
    columns_of = PropellaClassifier(model=replica("chatml")).runner.columns_of
    whole, longer = "é" * 50_000, "é" * 50_001
    assert columns_of(whole) == (whole,)
    assert columns_of(longer) == (f"{whole}\n<truncated_content>",)


@pytest.mark.parametrize("said", ["yes,yes,no", "no,no,no", "no,n/a,n/a", "yes,no,yes"])
def test_answers_of_wildguard_mean_what_its_parser_says(replica, said):
    answer = "Harmful request: {}\nResponse refusal: {}\nHarmful response: {}".format(
        *said.split(",")
    )
    request, refusal, response = re.match(r".*: (.*)\n.*: (.*)\n.*: (.*)", answer).groups()
    harm = {"yes": "harmful", "no": "unharmful", "n/a": "n/a"}
    assert forced(WildGuardClassifier(model=replica("chatml")), answer) == {
        "wildguard_prompt_harm": harm[request],
        "wildguard_response_refusal": {**harm, "yes": "refusal", "no": "compliance"}[refusal],
        "wildguard_response_harm": harm[response],
    }


@pytest.mark.parametrize(
    "answer",
    [
        "513.212,510.71\n2,3\n3,1\n3,skip\n0,3\n0,2\n23,10\n2,skip\n4,skip\n2,1",
        "005.1,skip\n3,2\n3,skip\n4,5\n0,skip\n0,skip\n18,8\n3,2\n4,3\n3,skip",
        "746.92,-1\n2,-1\n2,1\n9,16\n3,skip\n1,4\n16,skip\n1,skip\n6,skip\n1,skip",
    ],
)
def test_answers_of_the_taxonomy_are_ten_lines_of_codes(replica, answer):
    subjects, *lines = [line.split(",") for line in answer.split("\n")]
    expected = {"eai_fdc": subjects[0], "eai_fdc_secondary": subjects[1]}
    for (name, (first, labels)), codes in zip(TAXONOMY.items(), lines, strict=True):
        named = dict(enumerate(labels, first)) | {-1: "Abstain"}
        expected[f"eai_{name}"] = named[int(codes[0])]
        expected[f"eai_{name}_secondary"] = named[int(codes[1].replace("skip", "-1"))]
    assert forced(TaxonomyClassifier(model=replica("chatml")), answer) == expected
    assert list(TaxonomyClassifier().schema().names) == list(expected)


@pytest.mark.parametrize(
    ("kind", "template"),
    [(ShieldGemmaClassifier, "shieldgemma"), (GraniteGuardianClassifier, "granite")],
)
def test_scores_are_the_share_of_yes_for_each_policy(replica, kind, template):
    oracle, settings = ChatOracle(replica(template)), kind.defaults["chat_template_kwargs"]
    found = kind(model=replica(template))(FRAME)
    criteria = dict(kind.defaults["criteria"])
    assert len(criteria) == {"shieldgemma": 4, "granite": 7}[template]
    for column, criterion in criteria.items():
        given = json.loads(settings.replace("{criterion}", criterion.replace('"', r"\"")))
        expected = [
            oracle.of_texts(oracle.prompt(text, **given), ["Yes", "No"])[0]
            for text in FRAME["text"]
        ]
        np.testing.assert_allclose(found[column], expected, atol=1e-5)
        assert np.std(expected) > 1e-3
    assert len({*found[list(criteria)].iloc[0]}) == len(criteria)


# Excerpts of long documents.


def test_long_texts_are_cut_to_three_parts_as_published_and_the_same_everywhere(replica):
    whole = "".join(f"{number:06d}," for number in range(10_000))
    for length in (29_999, 30_000):
        assert shortened(whole[:length]) == whole[:length]
    places = []
    for length in range(30_001, 70_001, 1_000):
        text = whole[:length]
        first, middle, last = re.fullmatch(
            r"\[beginning\]\n(.*)\n\[middle\]\n(.*)\n\[end\]\n(.*)", shortened(text)
        ).groups()
        assert (first, last) == (text[:10_000], text[-10_000:])
        assert len(middle) == 10_000
        place = text.index(middle)
        assert 10_000 <= place <= length - 20_000
        places.append((place - 10_000) / (length - 30_000))
    assert min(places) < 0.2 and max(places) > 0.8
    digest = hashlib.sha256(shortened(whole).encode()).hexdigest()
    assert digest == "1ce2bde307d19928436dfc79b86eae6d6414d27515d81365357a30438f014bba"
    columns_of = TaxonomyClassifier(model=replica("chatml")).runner.columns_of
    assert [columns_of(whole), columns_of("a")] == [(shortened(whole),), ("a",)]


@pytest.fixture
def excerpts_of_300(monkeypatch):
    """Documents of over 300 characters are read in part, as long ones are in practice."""
    monkeypatch.setattr(taxonomy, "WHOLE_CHARS", 300)
    monkeypatch.setattr(taxonomy, "PART_CHARS", 100)
    for runner in (taxonomy.TaxonomyRunner, taxonomy.PropellaRunner):
        monkeypatch.setattr(runner, "most_chars", 300)


EXCERPTED = pytest.mark.parametrize("kind", [TaxonomyClassifier, PropellaClassifier])
NUMBERS = "".join(f"{number:06d}," for number in range(200))
# A short prompt with a short answer.
BRIEF = {"system": None, "answer": "{kind}", "fields": {"kind": PROPELLA["content_integrity"]}}


@EXCERPTED
@pytest.mark.parametrize("max_chars", [None, 200, 300, 400])
@pytest.mark.usefixtures("excerpts_of_300")
def test_what_the_model_reads_does_not_depend_on_output_columns(replica, kind, max_chars):
    make = functools.partial(kind, model=replica("chatml"), confidence_field="sure", **BRIEF)
    expected = make()(pd.DataFrame({"text": [NUMBERS[:max_chars], "a", None]})).iloc[:, 1:]

    for columns in ({}, {"truncated_field": "cut"}, {"seen_field": "seen"}):
        found = make(max_chars=max_chars, **columns)(pd.DataFrame({"text": [NUMBERS, "a", None]}))
        pd.testing.assert_frame_equal(found[expected.columns], expected, atol=1e-6)


@EXCERPTED
@pytest.mark.usefixtures("excerpts_of_300")
def test_parts_of_a_document_that_are_left_out_count_as_not_read(replica, kind):
    texts = [NUMBERS[:300], NUMBERS[:301], NUMBERS[:600], NUMBERS[:1200], ""]
    make = functools.partial(
        kind, model=replica("chatml"), truncated_field="cut", seen_field="seen", **BRIEF
    )
    for max_chars, truncated in ((None, 3), (450, 2)):  # two texts are equal after this cut
        classifier = make(max_chars=max_chars)
        with collected_stats() as runs:
            found = classifier(pd.DataFrame({"text": [*texts, None]}))

        assert found["cut"].tolist() == [False, True, True, True, False, pd.NA]
        np.testing.assert_allclose(found["seen"].iloc[:-1], [1, 300 / 301, 0.5, 0.25, 1])
        assert runs[0].truncated_texts == truncated
    lengths = classifier.runner.token_lengths(texts)
    assert (lengths.windows < lengths.whole).tolist() == [False, True, True, True, False]
    most = int(lengths.windows[2]) - 50
    assert 0.3 < make(max_seq_length=most)(pd.DataFrame({"text": texts}))["seen"].iloc[2] < 0.49


@EXCERPTED
@pytest.mark.usefixtures("excerpts_of_300")
def test_other_columns_of_a_prompt_stay_whole(replica, kind):
    classifier = kind(model=replica("chatml"), prompt="{title}\n{text}\n{url}")
    frame = pd.DataFrame({"title": NUMBERS, "text": [NUMBERS], "url": "u" * 400})
    prompt = classifier.first_prompt(frame, 10_000)
    (document,) = kind(model=replica("chatml")).runner.columns_of(NUMBERS)
    assert f"{NUMBERS}\n{document}\n{'u' * 400}" in prompt


# What is declared.


@pytest.mark.parametrize(
    ("kind", "template", "column", "setting"),
    [
        (Qwen3GuardClassifier, "qwen", "text", "text_field"),
        (Qwen3GuardResponseClassifier, "qwen", "response", "response"),
        (WildGuardClassifier, "chatml", "response", "prompt"),
    ],
)
def test_a_column_that_is_missing_is_told_with_what_names_it(
    replica, kind, template, column, setting
):
    with pytest.raises(ValueError, match=f"no text column '{column}'.*Pass {setting}= to name"):
        kind(model=replica(template))(FRAME.drop(columns=column))


def test_licences_and_gates_are_declared_for_every_published_guard():
    published = [one for one in vars(published_guards).values() if isinstance(one, type)]
    published = [one for one in published if one.__module__ == published_guards.__name__]
    assert len([one for one in published if issubclass(one, PromptClassifier)]) == 8
    gated = {one.__name__ for one in published if vars(one).get("is_gated")}
    assert gated == {"LlamaGuardClassifier", "ShieldGemmaClassifier", "WildGuardClassifier"}
    assert all(vars(one)["licence"] and vars(one)["purpose"] for one in published)
