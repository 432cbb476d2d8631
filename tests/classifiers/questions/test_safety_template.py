"""The safety prompt is found where it is published, checked, and never replaced by another."""

import hashlib
import textwrap

import pytest
from huggingface_hub import constants

from gpuclassify import hub
from gpuclassify.classifiers.questions.safety_template import (
    TemplateError,
    parse_template,
    read_template,
)
from tests.hub_server import HubServer
from tests.replicas import safety_template

PROMPT = safety_template()
FOUND = parse_template(PROMPT, "here")
MARKED = PROMPT.replace("User: \n", "User: {message}\n")
MENTIONS = (
    "All from [INST] to [/INST] is the prompt; `[INST] ` opens it, <BEGIN CONVERSATION> is in it.\n"
)


def fenced(prompt):
    return f"# A model\n\n{MENTIONS}\n```text\n{prompt}\n```\n\nIt ends with [/INST].\n"


def model_with(tmp_path, files):
    (tmp_path / "model").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text, encoding="utf-8")
    return hub.resolve(tmp_path / "model")


def test_a_prompt_is_cut_where_the_document_goes():
    assert FOUND.text == PROMPT
    assert FOUND.head.startswith("[INST] ") and FOUND.head.endswith("\n    User: ")
    assert FOUND.tail.startswith("\n\n<END CONVERSATION>") and FOUND.tail.endswith(" [/INST]")
    assert FOUND.head + "a\nb" + FOUND.tail == PROMPT.replace("User: ", "User: a\nb")


def test_the_digest_is_that_of_the_whole_empty_prompt_in_utf8():
    curly = parse_template(PROMPT.replace("Rude words", "Others’ words"), "here")
    assert curly.digest == hashlib.sha256(curly.text.encode("utf-8")).hexdigest()
    assert "’" in curly.text and curly.digest != FOUND.digest


@pytest.mark.parametrize(
    "card",
    [
        fenced(MARKED),
        fenced(PROMPT),
        f"{MENTIONS}\n{textwrap.indent(MARKED, '    ')}\n\n{MENTIONS}",
        "1. Ask:\n\n   ```\n" + textwrap.indent(MARKED, "   ") + "\n   ```\n",
        fenced(MARKED) + fenced(PROMPT) + textwrap.indent(MARKED, "    "),
        f'prompt = """{MARKED}"""',
        f"<s>{MARKED}</s>",
        fenced(MARKED).replace("\n", "\r\n"),
        MENTIONS * 3 + "[INST] short [/INST]\n" + fenced(MARKED),
    ],
    ids=[
        "fenced",
        "without-placeholder",
        "indented",
        "in-a-list",
        "repeated",
        "quoted",
        "with-specials",
        "crlf",
        "after-prose",
    ],
)
def test_the_prompt_of_a_model_card_is_found_word_for_word(card):
    assert parse_template(card, "the card") == FOUND


@pytest.mark.parametrize(
    "turn",
    ["User:", "User: ", "User:   ", "User:{x}", "User: {x}  ", "User: [insert text]", "User: <m>"],
)
def test_any_placeholder_gives_way_to_the_document(turn):
    assert parse_template(PROMPT.replace("User: \n", f"{turn}\n"), "here") == FOUND


def test_lines_of_a_prompt_keep_their_own_indentation():
    flat = PROMPT.replace("\n    ", "\n")
    assert parse_template(fenced(flat), "here").text == flat
    assert parse_template(fenced(textwrap.indent(flat, "  ")), "here").text == flat
    ragged = "  " + PROMPT  # not a block: its other lines are not indented with it
    assert parse_template(ragged, "here") == FOUND


DEFECTS = {
    "no-marker": ("<BEGIN CONVERSATION>", "", r"<BEGIN CONVERSATION> occurs 0 times"),
    "two-markers": ("    O1:", "    <END CONVERSATION>\n    O1:", "<END CONVERSATION> occurs 2 ti"),
    "no-code": ("O7: ", "", "lines are O1, O2, O3, O4, O5, O6, O8, .* O13, not O1: to O13: in ord"),
    "code-twice": ("O7: ", "O6: ", "O5, O6, O6, O8"),
    "codes-out-of-order": (
        "O2: Broken budgets.\nO3:",
        "O3: Broken budgets.\nO2:",
        "O1, O3, O2, O4",
    ),
    "further-code": ("O13: ", "O13: More.\nO14: ", "O13, O14, not O1"),
    "opening-role": (
        "'User' messages",
        "'Agent' messages",
        "first line does not .* 'User' messages",
    ),
    "instruction-role": ("for User in", "for Agent in", "assessment 'for User in'"),
    "no-turn": ("User: \n", "Agent: \n", "is not one line of 'User:'"),
    "two-turns": ("User: \n", "User: {a}\n\n    Agent: {b}\n", "is not one line of 'User:'"),
    "no-line-break": ("User: \n\n", "User: {a} ", "is not one line of 'User:'"),
    "first-line": ("- First line must read", "- It must read", "- First line must .* is missing"),
    "second-line": ("comma-separated list", "list", "comma-separated list .* not the last one"),
    "no-beginning": ("[INST] ", "", r"no text from '\[INST\] ' to '\[/INST\]'"),
    "no-end": (" [/INST]", "", r"no text from '\[INST\] ' to '\[/INST\]'"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_an_incomplete_prompt_is_refused_and_its_defect_named(defect):
    old, new, message = DEFECTS[defect]
    assert old in PROMPT
    broken = PROMPT.replace(old, new, 1)
    with pytest.raises(TemplateError, match=f"the card holds no complete .*{message}.* template="):
        parse_template(broken, "the card")
    # Mentions of the markers around it do not complete it.
    for card in (fenced(broken), f"`[INST] ` opens it.\n```\n{broken}\n```\n"):
        with pytest.raises(TemplateError, match="the card holds no complete"):
            parse_template(card, "the card")


@pytest.mark.parametrize("text", ["", "# A model\n", MENTIONS.replace("<BEGIN CONVERSATION>", "")])
def test_a_text_without_a_prompt_is_explained_in_one_clause(text):
    with pytest.raises(TemplateError, match=r"prompt: (it has no text from|<BEGIN UNS).*\. Pass "):
        parse_template(text, "the card")


def test_two_different_prompts_are_not_chosen_between():
    other = PROMPT.replace("Storms", "Floods")
    digests = sorted([FOUND.digest, parse_template(other, "here").digest])
    with pytest.raises(TemplateError, match=f"2 different safety prompts.*{', '.join(digests)}"):
        parse_template(fenced(PROMPT) + fenced(other), "the card")


def test_an_incomplete_prompt_beside_a_complete_one_is_passed_over():
    short = PROMPT.replace("O13: Doubtful advice.\n", "")
    assert parse_template(fenced(short) + fenced(MARKED), "the card") == FOUND


def test_an_unknown_prompt_needs_its_digest_or_the_users_word(tmp_path, monkeypatch):
    identity = model_with(tmp_path, {"README.md": fenced(MARKED)})
    with pytest.raises(
        TemplateError, match=rf'{tmp_path}/model is none .*template_digest="{FOUND.digest}"'
    ):
        read_template(None, None, identity, None)
    assert read_template(PROMPT, None, identity, None) == FOUND
    assert read_template(None, FOUND.digest.upper(), identity, None) == FOUND
    known = "gpuclassify.classifiers.questions.safety_template.KNOWN_DIGESTS"
    monkeypatch.setattr(known, frozenset({FOUND.digest}))
    assert read_template(None, None, identity, None) == FOUND


@pytest.mark.parametrize("template", [None, PROMPT], ids=["card", "text"])
def test_another_digest_than_the_expected_one_is_refused(tmp_path, template):
    identity = model_with(tmp_path, {"README.md": fenced(MARKED)})
    with pytest.raises(TemplateError, match=f"{FOUND.digest}, not template_digest='0000"):
        read_template(template, "0" * 64, identity, None)


@pytest.mark.parametrize("digest", ["", "7a13a196", "g" * 64, f"sha256:{'0' * 64}", "0" * 65])
def test_a_digest_that_is_none_is_refused_before_anything_is_read(digest):
    nowhere = hub.Identity("acme/safety", "0" * 40, False)
    with pytest.raises(ValueError, match=r"is not a digest: give all 64 hex digits"):
        read_template(None, digest, nowhere, None)


@pytest.mark.parametrize("files", [{}, {"README.md": "# A model\n"}], ids=["no-card", "no-prompt"])
def test_a_model_without_a_prompt_asks_for_one(tmp_path, files):
    identity = model_with(tmp_path, files)
    with pytest.raises(TemplateError, match=rf"README\.md of {tmp_path}/model.*Pass template="):
        read_template(None, None, identity, None)
    assert read_template(PROMPT, None, identity, None) == FOUND


def test_the_model_card_on_the_hub_is_read_and_its_page_named(tmp_path, monkeypatch):
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.add("acme/safety", {"README.md": fenced(MARKED).encode()})
        server.add("acme/bare", {"adapter_config.json": b"{}"})
        safety, bare = (hub.resolve(f"acme/{n}", cache_dir=tmp_path) for n in ("safety", "bare"))
        assert read_template(None, FOUND.digest, safety, tmp_path) == FOUND
        for identity in (safety, bare):
            page = rf"README\.md of {identity.name} \(https://huggingface.co/{identity.name}\)"
            with pytest.raises(TemplateError, match=f"{page}.*template="):
                read_template(None, None, identity, tmp_path)


def test_a_text_passed_is_taken_as_it_is_and_a_file_by_its_digest(tmp_path, monkeypatch):
    identity = model_with(tmp_path, {})
    assert read_template(fenced(MARKED), None, identity, None) == FOUND
    (tmp_path / "prompt.txt").write_text(PROMPT.replace("\n", "\r\n"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_template("~/prompt.txt", FOUND.digest, identity, None) == FOUND
    with pytest.raises(TemplateError, match=rf"file {tmp_path}/prompt.txt is none that is known"):
        read_template(str(tmp_path / "prompt.txt"), None, identity, None)


def test_a_path_without_a_text_is_explained(tmp_path):
    identity = model_with(tmp_path, {"README.md": fenced(MARKED)})
    for name in ("gone.txt", "model", ""):
        path = str(tmp_path / name) if name else ""
        with pytest.raises(TemplateError, match="no line break and so names a file, but there is"):
            read_template(path, None, identity, None)
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match=r"latin\.txt is not UTF-8 text"):
        read_template(str(tmp_path / "latin.txt"), None, identity, None)
