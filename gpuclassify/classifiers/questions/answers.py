"""Read answers of a fixed form from a decoder's logits, with probabilities of their options."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from gpuclassify.settings.checks import check_names, check_ordered, setting_names
from gpuclassify.settings.declared import Declared, setting
from gpuclassify.settings.options import template_pieces

Tokens = tuple[int, ...]
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # surrogates, which Arrow's strings cannot hold
# Stand-in for a free text, to tokenize the literal after it.
_AFTER_FREE_TEXT = "a"
# Labels, possibly with the texts that the model writes for each.
Options = Sequence[str] | Mapping[str, str | Sequence[str]]


def _normal_options(options: Any) -> tuple[Any, ...]:
    spellings = _spellings(options)
    are_labels = all(texts == (label,) for label, texts in spellings)
    return tuple(dict(spellings)) if are_labels else spellings


@dataclasses.dataclass(frozen=True)
class Choice(Declared):
    """Answer field whose value is one of some options.

    Attributes
    ----------
    options : list of str, or dict of label to str or list of str
        Labels that the model writes; or the text that it writes for each label, or several texts,
        whose probabilities are added.
    ends : list of str
        Labels after which the answer ends, so that the answer's later fields have no values.
    """

    options: Options = setting(kw_only=False, convert=_normal_options)
    ends: str | Sequence[str] = setting(default=(), kw_only=False, is_tuple=True)

    def check_together(self) -> None:
        """Raise ValueError if `ends` names a label that is not among the options."""
        if unknown := set(self.ends) - set(self.labels):
            raise ValueError(f"ends={sorted(unknown)} are none of the labels {list(self.labels)}")

    @functools.cached_property
    def spellings(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Pairs of a label and the texts that the model may write for it, in option order."""
        return _spellings(self.options)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels, in the order of the options."""
        return tuple(dict(self.spellings))


@dataclasses.dataclass(frozen=True)
class Several(Choice):
    """Answer field whose value is a list of labels, each at most once, in the order of the answer.

    It may be empty only if `none` is set.

    Attributes
    ----------
    separator : str
        Text between two options.
    none : str
        Text that the model writes if no option applies. If None, it writes at least one option.
    """

    separator: str = setting(default=", ", kw_only=False, least=0)
    none: str | None = setting(default=None, kw_only=False, least=0)

    def check_together(self) -> None:
        """Raise ValueError if `ends` is set, because only a `Choice` can end an answer."""
        if self.ends:
            raise ValueError(
                f"ends={list(self.ends)} is for Choice: a list of options ends nothing"
            )


@dataclasses.dataclass(frozen=True)
class Free(Declared):
    """Answer field of any text, decoded greedily.

    Attributes
    ----------
    max_tokens : int
        Maximum tokens of the field.
    stop : str
        Text that ends the field, and is not a part of it; "" for none. The end of the answer always
        ends the field.
    separator : str
        Text between two items, which makes the field a list of texts. If None, it is one text.
    is_json : bool
        Whether the model writes the text, or each item, between the quotes of a JSON string. Its
        escapes, such as ``\\n``, are decoded; text with invalid escapes stays as it is.
    """

    max_tokens: int = 64
    stop: str = setting(default="\n", kw_only=False, least=0)
    separator: str | None = setting(default=None, kw_only=False, least=1)
    is_json: bool = setting(default=False, kw_only=False)

    def value(self, text: str) -> str | list[str]:
        """Return the field's value for the decoded text: a text, or a list without empty items."""
        if self.separator is None:
            return self._decoded(text)
        return [self._decoded(item) for item in text.split(self.separator) if item]

    def _decoded(self, text: str) -> str:
        if not self.is_json:
            return text
        try:
            decoded = json.loads(f'"{text}"', strict=False)
        except ValueError:
            return text
        return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", decoded)


Field = Choice | Several | Free


def is_list(field: Field) -> bool:
    """Return whether the values of a field are lists: of labels, or of free texts."""
    return isinstance(field, Several) or (isinstance(field, Free) and field.separator is not None)


_KINDS: dict[str, Any] = {"choice": Choice, "several": Several, "free": Free}


def _spellings(options: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Check options, and convert them to pairs of a label and the texts that mean it."""
    if isinstance(options, tuple) and options and all(isinstance(one, tuple) for one in options):
        options = dict(options)
    if isinstance(options, str) or not isinstance(options, Collection):
        raise TypeError(f"options {options!r}: pass a list of labels, or a dict of label to text")
    check_ordered("options", options)
    pairs = options.items() if isinstance(options, Mapping) else ((one, one) for one in options)
    made = tuple(
        (label, tuple(text) if isinstance(text, list | tuple) else (text,)) for label, text in pairs
    )
    texts = [text for _, several in made for text in several]
    for one in (*(label for label, _ in made), *texts):
        if not isinstance(one, str):
            kind = type(one).__name__
            raise TypeError(f"option {one!r} is a {kind}: options are str, which YAML wants quoted")
        if not one.strip():
            raise ValueError(f"option {one!r} is empty: every option is a text that can be written")
    if without := [label for label, several in made if not several]:
        raise ValueError(f"label {without[0]!r} has no text: pass what the model writes for it")
    if len(made) < 2:
        raise ValueError(f"options {texts} leave no choice: pass at least two")
    if repeated := [text for text in texts if texts.count(text) > 1]:
        raise ValueError(f"option {repeated[0]!r} is given twice: every text means one label")
    if len({label for label, _ in made}) < len(made):
        raise ValueError(f"labels {[label for label, _ in made]} are not all different")
    return made


def named_field(options: Any) -> Field:
    """Make an answer field from a setting: a list or dict of options, or a field object.

    In files of settings, a field object is a dict of its class, in lower case, to its attributes:
    ``{"several": {"options": ["a", "b"], "none": "none"}}``.
    """
    if isinstance(options, Mapping) and len(options) == 1:
        ((name, attributes),) = options.items()
        if name in _KINDS and isinstance(attributes, Mapping):
            check_names(f"{name} has", "attribute", attributes, setting_names(_KINDS[name]))
            return _KINDS[name](**attributes)
    return options if isinstance(options, Choice | Free) else Choice(options)


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """Form of an answer: its fields, and the literal texts before, between and after them."""

    names: tuple[str, ...]
    fields: tuple[Field, ...]
    literals: tuple[str, ...]  # one more than fields

    @classmethod
    def of(cls, template: str, fields: Mapping[str, Any]) -> AnswerForm:
        """Parse the template of an answer, such as ``"Safety: {safety}"``.

        `fields` maps each name in braces to its options, or to a field object, such as `Several`.
        Raises ValueError unless each name is once in the template, and in `fields`.
        """
        names, literals = [], [""]
        for text, name in template_pieces(template, "answer"):
            literals[-1] += text
            if name is not None:
                names.append(name)
                literals.append("")
        if sorted(names) != sorted(fields) or not names:
            raise ValueError(
                f"answer={template!r} names the fields {names}, and fields= describes "
                f"{list(fields)}: each must be in both, once"
            )
        known = tuple(named_field(fields[name]) for name in names)
        form = cls(tuple(names), known, tuple(literals))
        form._check_can_be_told_apart()
        return form

    def _check_can_be_told_apart(self) -> None:
        """Raise ValueError if an option of a `Choice` begins another one and no text follows it."""
        for number, field in enumerate(self.fields):
            ends = field.ends if isinstance(field, Choice) else ()
            if type(field) is not Choice or (self.literals[number + 1] and not ends):
                continue
            closed = set(ends) if self.literals[number + 1] else set(field.labels)
            texts = [text for _, several in field.spellings for text in several]
            for label, several in field.spellings:
                for short, long in itertools.product(several, texts):
                    if label in closed and short != long and long.startswith(short):
                        raise ValueError(
                            f"option {short!r} is how {long!r} begins, so that the first tokens do "
                            "not tell them apart: spell one differently, or let a text follow in "
                            "answer="
                        )


@dataclasses.dataclass
class Answer:
    """Answer to one prompt: each field's value and probability, and the answer's token ids.

    For criteria, it has only `shares`: the probability of the first option for each criterion.
    """

    # Probabilities of the first field's labels, float64 (labels,); None for `Several` and `Free`.
    shares: np.ndarray | None = None
    # A label, labels, or a text or texts per field; None if the answer ended before it.
    values: list[Any] = dataclasses.field(default_factory=list)
    # Probability of each field's value; NaN if the answer ended before it.
    confidences: list[float] = dataclasses.field(default_factory=list)
    tokens: Tokens = ()  # tokens of the most probable answer
    raw: str | None = None  # the free answer, decoded


# Results for a row, by tokens of its partial answer: logits of `columns`, and the most likely next
# token with its probability, or -1 if it was not requested.
Known = Mapping[Tokens, tuple[np.ndarray, int, float]]
Reading = Generator[Tokens, None, Any]  # yields tokens after which results are needed


class Freely(tuple[int, ...]):
    """Token ids after which not only logits are requested, but also the most likely next token."""

    __slots__ = ()


class _Node:
    """Node in a prefix tree (trie) of the token ids of all options of an answer field."""

    def __init__(self) -> None:
        self.following: dict[int, _Node] = {}
        self.option: int | None = None
        self.tokens: Tokens = ()  # tokens of the option, without its end marker
        self.columns: np.ndarray | None = None  # logit columns of the possible next tokens
        # Whether an option's probability is a sum over several nodes, so that all are needed.
        self.has_split_option = False

    def add(self, tokens: Tokens, end: int, option: int) -> bool:
        """Add an option's ids; return False if they equal or begin another option's, or vice versa.

        The first `end` ids are the option's text, and ids after them, if any, mark where it ends.
        """
        node, is_new = self, False
        for token in tokens:
            is_new |= token not in node.following
            node = node.following.setdefault(token, _Node())
            if node.option is not None and not is_new:
                return False
        node.option, node.tokens = option, tokens[:end]
        return is_new


class AnswerReader:
    """Reader that turns a decoder's logits into answers of one form.

    `encode` converts a text to its token ids, without additional special tokens, and `decode`
    converts ids to text. `before` is the text at the end of all prompts, and `end_ids` are the
    token ids that end an answer. Unless `needs_shares`, the probabilities of the first field's
    options may be lower bounds. `places` has the column of the logits by token id, to which this
    reader adds the tokens that it needs; readers of the same rows share it. Raises ValueError if
    the tokenizer merges the answer with the document before `before`, or texts of neighbouring
    fields, or if two options cannot be told apart by their tokens.

    The attribute `dropped` is the number of the prompt's last tokens that depend on the answer's
    text. The caller drops them from prompts, and the reader reads them as the beginning of the
    answer.
    """

    def __init__(
        self,
        form: AnswerForm,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Tokens], str],
        before: str,
        end_ids: Collection[int],
        needs_shares: bool = True,
        places: dict[int, int] | None = None,
    ) -> None:
        self.form = form
        self._encode, self._decode = encode, decode
        self._end_ids = frozenset(end_ids)
        self._needs_shares = needs_shares
        self._places = {} if places is None else places
        self._trees: dict[Any, _Node] = {}
        self._sequences: dict[tuple[str, str], Tokens] = {}
        self._before, self.dropped = before, 0
        base = encode(before)
        for text in self._texts_of(0):
            whole = encode(before + text)
            same = next((i for i, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b),
                        min(len(base), len(whole)))  # fmt: skip
            self.dropped = max(self.dropped, len(base) - same)
        if self.dropped >= len(base):
            raise ValueError(
                f"the prompt ends with {before!r}, which the tokenizer joins with the document: "
                "end it with a text, such as '\\nAnswer:', or pass one as opening="
            )
        self._check_seams()

    @property
    def has_free_fields(self) -> bool:
        """Whether a field is free text, which needs the most likely token of all tokens."""
        return any(isinstance(field, Free) for field in self.form.fields)

    @property
    def columns(self) -> Tokens:
        """Token ids of the logit columns, in order; more may be appended while answers are read."""
        return tuple(self._places)

    @property
    def most_tokens(self) -> int:
        """Approximate number of tokens of the longest answer."""
        total = self.dropped
        for number, field in enumerate(self.form.fields):
            literal = len(self._encode(self.form.literals[number])) + 2
            if isinstance(field, Free):
                total += literal + field.max_tokens
            else:
                lengths = [
                    len(self._encode(t)) + 2 for _, several in field.spellings for t in several
                ]
                total += literal + (sum(lengths) if isinstance(field, Several) else max(lengths))
        return total

    def read(self, known: Known, start: Tokens = ()) -> Reading:
        """Read an `Answer`: see `Reader.read` in generation.py.

        The yielded token ids begin with `start`, the token ids between the prompt and the answer.
        """
        answer, path, previous = Answer(), start, self._before
        value: Any
        for number, field in enumerate(self.form.fields):
            if isinstance(field, Free):
                literal = self._sequence(previous, self.form.literals[number])
                text, share, tokens = yield from self._decode_freely(field, known, path + literal)
                value = field.value(text)
                path += literal + tokens
                previous = _AFTER_FREE_TEXT
            else:
                read: Any = self._choose_several if isinstance(field, Several) else self._choose_one
                value, share, path, previous = yield from read(
                    number, field, answer, known, path, previous
                )
            answer.values.append(value)
            answer.confidences.append(share)
            if isinstance(field, Choice) and not isinstance(field, Several) and value in field.ends:
                break
        missing = len(self.form.fields) - len(answer.values)
        answer.values += [None] * missing
        answer.confidences += [np.nan] * missing
        answer.tokens = path
        return answer

    def _choose_one(
        self, number: int, field: Choice, answer: Answer, known: Known, path: Tokens, previous: str
    ) -> Generator[Tokens, None, tuple[str, float, Tokens, str]]:
        texts = [(label, text) for label, several in field.spellings for text in several]
        needs_all = (number == 0 and self._needs_shares) or len(texts) > len(field.labels)
        tree = self._tree(number, previous)
        shares, tokens = yield from _explore(tree, known, path, len(texts), needs_all)
        owners = [field.labels.index(label) for label, _ in texts]
        by_label = np.bincount(owners, weights=shares, minlength=len(field.labels))
        best = int(by_label.argmax())
        if number == 0:
            answer.shares = by_label
        spelt = max((i for i, owner in enumerate(owners) if owner == best), key=shares.__getitem__)
        text = self.form.literals[number] + texts[spelt][1]
        return field.labels[best], float(by_label[best]), path + tokens[spelt], text

    def _choose_several(
        self, number: int, field: Several, answer: Answer, known: Known, path: Tokens, previous: str
    ) -> Generator[Tokens, None, tuple[list[str], float, Tokens, str]]:
        labels: list[str] = []
        total = 1.0
        spelt = dict(field.spellings)
        while len(labels) < len(field.labels):
            rest = tuple(label for label in field.labels if label not in labels)
            tree = self._tree(number, previous, rest, is_first=not labels)
            texts = [(label, text) for label in rest for text in spelt[label]]
            needs_all = tree.has_split_option
            shares, tokens = yield from _explore(tree, known, path, len(texts) + 1, needs_all)
            best = int(shares.argmax())
            total *= float(shares[best])
            if best == len(texts):
                if not labels:
                    none = self.form.literals[number] + (field.none or "")
                    path, previous = path + tokens[best], none
                break
            label, text = texts[best]
            before = field.separator if labels else self.form.literals[number]
            path, previous = path + tokens[best], before + text
            labels.append(label)
        return labels, total, path, previous

    def _decode_freely(
        self, field: Free, known: Known, path: Tokens
    ) -> Generator[Tokens, None, tuple[str, float, Tokens]]:
        tokens: Tokens = ()
        total = 1.0
        while len(tokens) < field.max_tokens:
            if path + tokens not in known or known[path + tokens][1] < 0:
                yield Freely(path + tokens)
            _, token, share = known[path + tokens]
            if token in self._end_ids or (
                field.stop and field.stop in self._decode((*tokens, token))
            ):
                if token not in self._end_ids:
                    text = self._decode((*tokens, token)).partition(field.stop)[0]
                    # Drop tokens with a part of the stop, and encode the rest of the text again.
                    while len(kept := self._decode(tokens)) > len(text):
                        tokens = tokens[:-1]
                    tokens += tuple(self._encode(text[len(kept) :]))
                    return text, total * share, tokens
                total *= share
                break
            tokens, total = (*tokens, token), total * share
        return self._decode(tokens), total, tokens

    # Prefix trees of the token ids of choices.

    def _check_seams(self) -> None:
        """Raise ValueError if the tokenizer merges neighbouring texts, or options are ambiguous."""
        starts = [self._before]
        for number, field in enumerate(self.form.fields):
            for start in starts:
                if isinstance(field, Free):
                    self._sequence(start, self.form.literals[number])
                else:
                    self._tree(number, start)
            starts = [_AFTER_FREE_TEXT] if isinstance(field, Free) else self._texts_of(number)
            if isinstance(field, Several):
                texts = [text for _, several in field.spellings for text in several]
                items = [field.separator + text for text in texts]
                for item in items:
                    self._sequence(item, items[0])
                self._tree(number, items[0], field.labels[1:], is_first=False)
                self._tree(number, items[-1], field.labels[:-1], is_first=False)
                starts += items

    def _texts_of(self, number: int) -> list[str]:
        """Return the possible beginnings of field `number`, with the literal before the field."""
        field, literal = self.form.fields[number], self.form.literals[number]
        if isinstance(field, Free):
            return [literal] if literal else []
        texts = [literal + text for _, several in field.spellings for text in several]
        if isinstance(field, Several) and field.none is not None:
            texts.append(literal + field.none)
        return texts

    def _sequence(self, before: str, text: str) -> Tokens:
        """Return the token ids of `text` after the text `before`.

        If `before` is the end of the prompt, the result begins at its last `dropped` tokens, which
        `text` may change.
        """
        if (before, text) not in self._sequences:
            base, whole = self._encode(before), self._encode(before + text)
            kept = len(base) - (self.dropped if before is self._before else 0)
            if list(whole[:kept]) != list(base[:kept]):
                raise ValueError(
                    f"the tokenizer writes the end of {before[-20:]!r} otherwise where {text!r} "
                    "follows: begin what stands between two fields with a line break, a comma or "
                    "a quotation mark"
                )
            self._sequences[before, text] = tuple(whole[kept:])
        return self._sequences[before, text]

    def _tree(
        self, number: int, before: str, rest: tuple[str, ...] | None = None, is_first: bool = True
    ) -> _Node:
        """Return the prefix tree of token ids of the options that can come next in field `number`.

        They come after the text `before`. In a `Several` field, `rest` are the labels not chosen
        yet (None: all), and one more option is last: for the first label (`is_first`), the text
        `none`, if there is one; for later labels, the end of the list.
        """
        field = self.form.fields[number]
        if isinstance(field, Free):
            return _Node()
        lead = self.form.literals[number] if is_first or not isinstance(field, Several) else (
            field.separator
        )  # fmt: skip
        written: list[tuple[str, Callable[[str], Collection[int]]]] = []
        for label, several in field.spellings:
            if rest is None or label in rest:
                after: Callable[[str], Collection[int]]
                if isinstance(field, Several):
                    others = tuple(one for one in rest or field.labels if one != label)
                    after = functools.partial(self._after_item, number, others)
                else:
                    after = functools.partial(self._after_choice, number)
                written += [(lead + text, after) for text in several]
        if isinstance(field, Several) and is_first and field.none is not None:
            written.append((lead + field.none, functools.partial(self._after_field, number)))
        seam = self._sequence(before, written[0][0]) if written else ()
        ends = frozenset() if is_first else self._sequences_after(number, before)
        # A text `before` that changes the first option's tokens changes all options.
        key = (number, rest, seam, ends)
        if key not in self._trees:
            ways = [(self._sequence(before, text), text, after) for text, after in written]
            self._trees[key] = self._new_tree(ways, ends)
        return self._trees[key]

    def _new_tree(
        self, ways: Sequence[tuple[Tokens, str, Callable[[str], Any]]], ends: Collection[Tokens]
    ) -> _Node:
        """Build the prefix tree of `ways` and of `ends`; raise ValueError if options are ambiguous.

        Each of `ways` has an option's token ids, its text, and a function from the text to the ids
        that may come next. `ends` are sequences of ids that can follow a `Several` field; all are
        one more option, "no further label", with the index ``len(ways)``.
        """
        root = _Node()
        beginnings = {tokens[:n] for tokens, *_ in ways for n in range(len(tokens))}
        # An item's separator may begin with the same tokens as an end, such as a quotation mark.
        ends = {
            end[: next((n for n in range(1, len(end)) if end[:n] not in beginnings), len(end))]
            for end in ends
        }
        for end in ends:
            root.add(end, 0, len(ways))
        root.has_split_option = len({end[:-1] for end in ends}) > 1
        for option, (tokens, text, after) in enumerate(ways):
            # If another option continues this one, the next tokens distinguish both.
            sequences = (
                [(*tokens, token) for token in after(text)] if tokens in beginnings else [tokens]
            )
            if not all(root.add(one, len(tokens), option) for one in sequences):
                raise ValueError(
                    f"the tokens of option {text!r} are not told from those of another: spell one "
                    "differently, or change what stands between them"
                )
        self._number(root)
        return root

    def _after_choice(self, number: int, text: str) -> Collection[int]:
        field = self.form.fields[number]
        assert isinstance(field, Choice)
        option = text.removeprefix(self.form.literals[number])
        is_end = any(option in several for label, several in field.spellings if label in field.ends)
        return self._end_ids if is_end else self._after_field(number, text)

    def _after_item(self, number: int, others: Sequence[str], text: str) -> Collection[int]:
        """Return the token ids that can follow a label in the list of a `Several` field."""
        field = self.form.fields[number]
        assert isinstance(field, Several)
        texts = [field.separator + one for label in others for one in dict(field.spellings)[label]]
        follows = {self._sequence(text, following)[0] for following in texts}
        return follows | set(self._after_field(number, text))

    def _after_field(self, number: int, text: str) -> Collection[int]:
        """Return the token ids that can come next if field `number` ends with `text`."""
        return {tokens[0] for tokens in self._sequences_after(number, text)}

    def _sequences_after(self, number: int, text: str) -> frozenset[Tokens]:
        """Return the token id sequences that can follow field `number` if it ends with `text`."""
        literal = self.form.literals[number + 1]
        if number + 1 < len(self.form.fields):
            texts = self._texts_of(number + 1)
        elif literal:
            texts = [literal]
        else:
            return frozenset((token,) for token in self._end_ids)
        return frozenset(self._sequence(text, following) for following in texts if following)

    def _number(self, node: _Node) -> None:
        """Assign a column of logits to each token id that has alternatives at or below `node`."""
        if len(node.following) > 1:
            columns = [self._places.setdefault(t, len(self._places)) for t in node.following]
            node.columns = np.array(columns)
        for following in node.following.values():
            self._number(following)


def _explore(
    tree: _Node, known: Known, path: Tokens, count: int, needs_all: bool
) -> Generator[Tokens, None, tuple[np.ndarray, list[Tokens]]]:
    """Return each option's probability, float64 (count,), and its token ids after `path`.

    A generator that yields token ids, as `Reader.read` does. A probability is a product of
    softmaxes over the tokens that `tree` allows. Unless `needs_all`, the search ends when the best
    option is known; all are lower bounds, or 0 with the ids ().
    """
    shares = np.zeros(count)
    tokens: list[Tokens] = [()] * count
    order = itertools.count()
    open_nodes = [(-1.0, next(order), path, tree)]  # heap, the most probable node first
    while open_nodes:
        if not needs_all:
            *_, second, first = [0.0, *sorted(shares)]
            if first >= second - sum(share for share, *_ in open_nodes):
                break
        negative, _, at, node = heapq.heappop(open_nodes)
        while node.option is None and len(node.following) == 1:  # a token without alternatives
            ((token, node),) = node.following.items()
            at = (*at, token)
        if node.option is not None:
            shares[node.option] -= negative
            tokens[node.option] = node.tokens
            continue
        columns = node.columns
        assert columns is not None
        if at not in known or len(known[at][0]) <= columns.max():
            yield at
        logits = known[at][0][columns].astype(np.float64)
        weights = np.exp(logits - logits.max())
        for (token, following), weight in zip(
            node.following.items(), weights / weights.sum(), strict=True
        ):
            if following.option is None:
                entry = (negative * weight, next(order), (*at, token), following)
                heapq.heappush(open_nodes, entry)
            else:  # probabilities of several tokens that end an option are added
                shares[following.option] -= negative * weight
                tokens[following.option] = following.tokens
    return shares, tokens
