"""What plain transformers says of answers to one prompt: whole texts, whole logits, no cache.

Nothing here uses gpuclassify, so that agreement with it is evidence. Answers of a fixed form are
walked as a person would: after all tokens so far, the softmax over those that the form allows.
"""

import functools
import itertools
import math

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from transformers.utils.chat_template_utils import (
    _CONTROL_TOKEN_END,
    _CONTROL_TOKEN_START,
    _get_control_token_patterns,
    encode_marked_chat,
    mark_control_tokens,
)

from tests.oracle import plain_tokenizer

logging.disable_progress_bar()
MARKS = (_CONTROL_TOKEN_START, _CONTROL_TOKEN_END)


class ChatOracle:
    """A decoder in a directory, maybe with a LoRA adapter, as transformers and peft run it."""

    def __init__(self, directory, adapter=None):
        self.tokenizer = plain_tokenizer(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter).eval()
        self._logits = {}

    def prompt(self, content, *, system=None, response=None, opening="", **settings):
        """The chat as the tokenizer's template writes it, with marks in control tokens of texts."""
        content, response = self.marked(content), response and self.marked(response)
        chat = [("system", system), ("user", content), ("assistant", response)]
        messages = [{"role": role, "content": text} for role, text in chat if text is not None]
        settings = {"add_generation_prompt": True, **settings}
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **settings) + opening

    def marked(self, text):
        """A text of the data, which has no control tokens: transformers marks their names."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = tuple(str(token) for token in added if token.special and "<0x" not in str(token))
        return mark_control_tokens(text, _get_control_token_patterns(names)[0])

    def ids(self, text, adds_special_tokens=False):
        """Marked names are text."""
        if not any(mark in text for mark in MARKS):
            return self.tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"]
        return self.ids("", adds_special_tokens) + encode_marked_chat(self.tokenizer, text)

    def logits(self, ids):
        """Of the token after `ids`, over the whole vocabulary, float64."""
        key = tuple(ids)
        if key not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self.model(torch.tensor([ids])).logits[0, -1].double()
        return self._logits[key]

    def shares(self, ids, told):
        """Probabilities of options, each of which `told` gives one or more rows of tokens for."""
        rows = [row for several in told for row in several]

        def share(row):
            product = 1.0
            for n, token in enumerate(row):
                allowed = sorted({one[n] for one in rows if one[:n] == row[:n] and len(one) > n})
                if len(allowed) > 1:
                    chosen = self.logits([*ids, *row[:n]])[allowed].softmax(0)
                    product *= chosen[allowed.index(token)].item()
            return product

        return [sum(map(share, several)) for several in told]

    def of_texts(self, prompt, texts, adds_special_tokens=False):
        """Probability of each text as the whole answer to a prompt."""
        ids, rows = self._tokens(self.ids(prompt, adds_special_tokens), prompt, texts)
        return self.shares(ids, [[row] for row in rows])

    def generate(self, prompt, max_new_tokens):
        """What the model answers freely and greedily."""
        ids = torch.tensor([self.ids(prompt)])
        output = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=0,
        )  # fmt: skip
        return self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    def _tokens(self, ids, context, texts):
        """`ids` as far as they stand before each of `texts`, and the tokens of each from there.

        `ids` end with the tokens of `context`.
        """
        base, wholes = self.ids(context), [self.ids(context + text) for text in texts]
        same = min(
            len([1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                                zip(base, whole, strict=False))])
            for whole in wholes
        )  # fmt: skip
        dropped = len(base) - same
        return ids[: len(ids) - dropped], [tuple(whole[same:]) for whole in wholes]

    # Answers of several fields.

    def walk(self, prompt, literals, fields):
        """Values and probabilities of an answer's fields; a literal before each, and one last.

        A field is ``("choice", {label: texts}, ends)``, ``("several", {label: texts}, separator,
        none)`` or ``("free", most, stop)``. None stands for what the answer does not reach.
        """
        self._literals, self._fields = literals, fields
        ids, context = self.ids(prompt), prompt
        values, shares = [], []
        for number, (kind, *rest) in enumerate(fields):
            value, share, ids, context = getattr(self, f"_{kind}")(number, ids, context, *rest)
            values.append(value)
            shares.append(share)
            if kind == "choice" and value in rest[1]:
                break
        missing = len(fields) - len(values)
        return values + [None] * missing, shares + [math.nan] * missing

    def _after(self, number, context):
        """First tokens of what may follow a field whose text `context` ends with."""
        return {row[0] for row in self._rows_after(number, context)}

    def _rows_after(self, number, context):
        """Rows of tokens that may follow a field whose text `context` ends with."""
        if number + 1 == len(self._fields):
            following = [self._literals[-1]]
        else:
            following = [self._literals[number + 1] + text for text in self._all_texts(number + 1)]
        if following == [""]:
            return [(self.tokenizer.eos_token_id,)]
        length = len(self.ids(context))
        return [tuple(self.ids(context + text)[length:]) for text in following]

    def _all_texts(self, number):
        kind, *rest = self._fields[number]
        if kind == "free":
            return [""]
        none = [rest[2]] if kind == "several" and rest[2] is not None else []
        return [*none, *itertools.chain.from_iterable(rest[0].values())]

    def _told(self, rows, follow):
        """Rows of tokens by which options are told, where one is how another begins."""
        return [
            [(*row, token) for token in follow(n)]
            if any(one[: len(row)] == row and one != row for one in rows) else [row]
            for n, row in enumerate(rows)
        ]  # fmt: skip

    def _told_from(self, rows, others):
        """`others` as far as each is needed to know that it is none of `rows`."""

        def is_open(start):
            return any(row[: len(start)] == start and len(row) > len(start) for row in rows)

        return sorted(
            {next((o[:n] for n in range(1, len(o)) if not is_open(o[:n])), o) for o in others}
        )

    def _choice(self, number, ids, context, options, ends):
        owners = [label for label, several in options.items() for _ in several]
        texts = [self._literals[number] + text for s in options.values() for text in s]
        ids, rows = self._tokens(ids, context, texts)

        def follow(n):
            if owners[n] in ends:
                return {self.tokenizer.eos_token_id}
            return self._after(number, context + texts[n])

        shares = self.shares(ids, self._told(rows, follow))
        by_label = dict.fromkeys(options, 0.0)
        for label, share in zip(owners, shares, strict=True):
            by_label[label] += share
        best = max(by_label, key=by_label.get)
        spelt = max((n for n, one in enumerate(owners) if one == best), key=shares.__getitem__)
        return best, by_label[best], [*ids, *rows[spelt]], context + texts[spelt]

    def _several(self, number, ids, context, options, separator, none):
        chosen, product = [], 1.0
        while len(chosen) < len(options):
            left = {label: texts for label, texts in options.items() if label not in chosen}
            lead = separator if chosen else self._literals[number]
            owners = [label for label, several in left.items() for _ in several]
            texts = [lead + text for several in left.values() for text in several]
            if none is not None and not chosen:
                owners.append(None)
                texts.append(lead + none)
            ids, rows = self._tokens(ids, context, texts)

            follow = functools.partial(
                self._after_item, number, context, texts, owners, left, separator
            )
            told = self._told(rows, follow)
            if chosen:  # the list may end here
                told.append(self._told_from(rows, self._rows_after(number, context)))
            shares = self.shares(ids, told)
            best = max(range(len(told)), key=shares.__getitem__)
            product *= shares[best]
            if best == len(texts):
                break
            ids, context = [*ids, *rows[best]], context + texts[best]
            if owners[best] is None:
                break
            chosen.append(owners[best])
        return chosen, product, ids, context

    def _after_item(self, number, context, texts, owners, left, separator, n):
        """Tokens that may follow text `n` of a list: another item's, or what follows the list."""
        whole = context + texts[n]
        after = self._after(number, whole)
        if owners[n] is None:
            return after
        others = [text for one, several in left.items() for text in several if one != owners[n]]
        length = len(self.ids(whole))
        return after | {self.ids(whole + separator + other)[length] for other in others}

    def _free(self, number, ids, context, most, stop):
        if self._literals[number]:
            ids, (row,) = self._tokens(ids, context, [self._literals[number]])
            ids = [*ids, *row]
        new, product = [], 1.0
        while len(new) < most:
            logits = self.logits([*ids, *new])
            token = int(logits.argmax())
            product *= logits.softmax(0)[token].item()
            said = self.tokenizer.decode([*new, token], skip_special_tokens=True)
            if token == self.tokenizer.eos_token_id:
                break
            if stop in said:
                text = said.partition(stop)[0]
                # What was said before the stop, in the tokens that it was said in.
                while len(self._decode(new)) > len(text):
                    new.pop()
                new += self.ids(text[len(self._decode(new)) :])
                return text, product, [*ids, *new], "x"
            new.append(token)
        return self._decode(new), product, [*ids, *new], "x"

    def _decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
