"""Drafts are what the most common answers go on with."""

from gpuclassify.questions.speculation import MOST_DRAFTED, SeenAnswers

SAFE, END = 5, 2


def seen(*answers):
    answers_seen = SeenAnswers()
    for answer in answers:
        answers_seen.add(answer)
    return answers_seen


def test_without_answers_there_is_nothing_to_draft():
    assert seen().continuations() == {}


def test_the_most_common_answer_is_drafted_but_for_its_last_token():
    table = seen((7, 8, END), (SAFE, END), (SAFE, END)).continuations()

    assert table[()] == (SAFE,)
    assert table[(SAFE,)] == ()
    assert table[(7,)] == (8,)
    assert (SAFE, END) not in table


def test_among_answers_with_one_beginning_the_most_common_is_drafted():
    table = seen((7, 8, 9, END), (7, 8, 9, END), (7, 4, END), (SAFE, END), (7, 4, END), (7, 4, END))

    assert table.continuations()[()] == (7, 4)
    assert table.continuations()[(7, 8)] == (9,)


def test_drafts_are_short_and_go_on_where_they_ended():
    answer = tuple(range(100, 150))
    table = seen(answer).continuations()

    assert table[()] == answer[:MOST_DRAFTED]
    assert table[answer[:30]] == answer[30 : 30 + MOST_DRAFTED]


def test_answers_that_come_once_do_not_pile_up_nor_drive_out_common_ones():
    answers = seen((SAFE, END), (SAFE, END))
    for number in range(1_000):
        answers.add((number, 9, END))

    assert len(answers.continuations()) < 200
    assert answers.continuations()[()] == (SAFE,)
