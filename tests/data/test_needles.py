import json
import random
import re
import sys

import pytest
from typer.testing import CliRunner

from trellis.cli import app
from trellis.data import load_tokenizer, prepare_corpus, train_tokenizer
from trellis.data import needles as needles_module
from trellis.data.needles import (
    BRIEF_WORDS,
    NOISE,
    SENTENCE_BREAK,
    VARIANTS,
    Haystack,
    Needles,
    draw,
    largest,
    part_of,
    read_haystack,
    write_needles,
)

STORY = (
    'It was late. "Who is there?" said the fox; nobody answered. He waited (and waited). '
    "then it rained.  The rain,\nas always, was wet!\tEverybody went home. Why? "
)
BOOK = STORY + "No one else of the 3.5 foxes knew. " * 20
HAYSTACK = Haystack([BOOK, "A second document. It has two sentences."])
BYTES = load_tokenizer("bytes")
SINGULAR = {"passkey": "number", "number": "number", "uuid": "uuid", "word": "word"}


def needles(part="test", seed=42, tokenizer=BYTES):
    return Needles(tokenizer, HAYSTACK, seed, part)


def parts(item, variant):
    """The texts before and after the needle; everything else is checked word by word."""
    kind = SINGULAR[variant]
    begin = (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    end = (
        f"\nWhat is the special magic {kind} for {item.key} mentioned in the provided text? "
        f"The special magic {kind} for {item.key} mentioned in the provided text is"
    )
    assert item.prompt.startswith(begin)
    assert item.prompt.endswith(end)
    context = item.prompt[len(begin) : -len(end)]
    needle = f"One of the special magic {kind}s for {item.key} is: {item.value}."
    assert context.count(needle) == 1
    return context.split(needle)


@pytest.mark.parametrize("depth", [0, 10, 37, 50, 99, 100])
def test_a_needle_in_noise_is_at_its_depth(depth):
    for index in range(3):
        item = needles().item("passkey", 3000, index, [depth])
        before, after = parts(item, "passkey")
        place = int(item.units * depth / 100)
        assert before == (NOISE + "\n") * place
        assert after == ("\n" + NOISE) * (item.units - place)


@pytest.mark.parametrize("depth", [0, 10, 37, 50, 99, 100])
@pytest.mark.parametrize("variant", ["number", "uuid", "word"])
def test_a_needle_in_an_essay_is_at_its_depth(variant, depth):
    item = needles().item(variant, 1500, 1, [depth])
    before, after = parts(item, variant)
    # The definition: the first words, single spaces between them, split by the regular expression.
    text = " ".join(" ".join(HAYSTACK.documents * 2).split()[: item.units])
    sentences = SENTENCE_BREAK.split(text)
    place = int(len(sentences) * depth / 100)
    assert before == " ".join(sentences[:place]) + " "
    assert after == " " + " ".join(sentences[place:])


def test_values_have_the_form_of_their_variant():
    import uuid

    found = {name: needles().item(name, 1000, 0) for name in VARIANTS}
    assert 10**6 <= int(found["passkey"].value) < 10**7
    assert 10**6 <= int(found["number"].value) < 10**7
    assert uuid.UUID(found["uuid"].value).version == 4
    adjectives, nouns = needles_module.word_lists()
    assert (len(adjectives), len(nouns)) == (910, 6782)  # RULER's, each once
    for text in (found["word"].value, *(item.key for item in found.values())):
        assert any(text == f"{a}-{text[len(a) + 1 :]}" for a in adjectives)
        assert any(text.endswith(f"-{n}") for n in nouns)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text((BOOK + NOISE + needles_module.PROMPT) * 3)
    train_tokenizer([folder / "text.txt"], 500, folder / "tokenizer.json")
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", ["train", "test"])
def test_prompts_fill_their_length_and_no_more(variant, part, bpe):
    for tokenizer, length in ((BYTES, 700), (BYTES, 1501), (bpe, 300), (bpe, 515)):
        made = needles(part, tokenizer=tokenizer)
        for index in range(5):
            item = made.item(variant, length, index)
            assert item.tokens == 1 + len(tokenizer.encode(item.prompt))
            assert item.tokens + 128 <= length
            step = len((NOISE + "\n") if VARIANTS[variant].noise else " Everybody")
            assert item.tokens + 128 > length - step - 5


def test_what_stands_before_a_prompt_counts():
    for before in (0, 3):
        item = Needles(BYTES, HAYSTACK, 42, "test", before).item("number", 700, 0)
        assert item.tokens == before + len(item.prompt.encode()) <= 700 - 128


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_haystack_is_found_whatever_the_estimate(seed):
    rng = random.Random(seed)
    true, told = [30], [0]
    for _ in range(200):
        true.append(true[-1] + rng.randint(1, 4))
        told.append(told[-1] + (rng.randint(1, 4) if seed % 2 else 40 * (rng.random() < 0.1)))
    for limit in (29, 30, 31, 200, 5000):
        units, tokens = largest(true.__getitem__, told, limit)
        fitting = [n for n, count in enumerate(true) if count <= limit]
        assert units == (fitting[-1] if fitting else 0)
        assert tokens == true[units]


def test_a_good_estimate_takes_few_counts():
    counts = []
    sums = [3 * n for n in range(10_000)]

    def count(n):
        counts.append(n)
        return 70 + sums[n]

    assert largest(count, sums, 20_000)[0] == (20_000 - 70) // 3
    assert len(counts) <= 4


def test_keys_and_values_of_training_and_test_are_apart():
    seen = {}
    for part in ("train", "test"):
        made = needles(part, seed=1)
        items = [made.item(name, 700, index) for name in VARIANTS for index in range(60)]
        seen[part] = {text for item in items for text in (item.key, item.value)}
        assert {part_of(text) for text in seen[part]} == {part}
    assert not seen["train"] & seen["test"]
    rng = random.Random(0)
    share = sum(part_of(str(rng.getrandbits(64))) == "train" for _ in range(4000)) / 4000
    assert share == pytest.approx(0.25, abs=0.03)
    assert part_of("1000000") == "train"  # fixed for ever, since models were trained on a part


def test_an_item_depends_on_its_number_and_options_alone():
    made = needles()
    first = made.item("number", 900, 5)
    for index in (7, 6, 0):
        made.item("uuid", 800, index)
    assert made.item("number", 900, 5) == first == needles().item("number", 900, 5)
    others = [
        needles(seed=43).item("number", 900, 5), needles("train").item("number", 900, 5),
        made.item("number", 901, 5), made.item("number", 900, 6), made.item("word", 900, 5),
    ]  # fmt: skip
    assert len({item.key for item in [first, *others]}) == 6


def test_other_words_have_another_hash(monkeypatch):
    adjectives, nouns = needles_module.word_lists()
    first = needles_module.words_sha256()
    assert needles_module.words_sha256() == first
    for other in ((adjectives[1:], nouns), ([*adjectives, nouns[0]], nouns[1:])):
        monkeypatch.setattr(needles_module, "word_lists", lambda lists=other: lists)
        assert needles_module.words_sha256() != first


def test_depths_are_taken_in_turn_or_drawn():
    made = needles()
    depths = [made.item("number", 700, index, [0, 50, 100]).depth for index in range(4)]
    assert depths == [0, 50, 100, 0]
    drawn = [made.item("number", 700, index).depth for index in range(200)]
    assert set(drawn) <= set(needles_module.RANDOM_DEPTHS)
    assert len(set(drawn)) > 30
    assert len(needles_module.RANDOM_DEPTHS) == 40


def test_test_texts_begin_at_the_beginning_and_training_texts_anywhere():
    words = " ".join(BOOK.split())
    for index in range(3):
        _, after = parts(needles().item("number", 900, index, [0]), "number")
        assert words.startswith(after.strip())
    starts = set()
    for index in range(30):
        _, after = parts(needles("train").item("number", 700, index, [0]), "number")
        starts.add(after.split()[0])
    assert starts <= {'"Who', "He", "The", "Everybody", "Why?", "No", "A", "It"}
    assert len(starts) >= 3


def test_a_text_that_is_too_short_begins_again():
    essay = Haystack(["One two.", " ", "Three"]).essay(7)
    assert essay.words == ["One", "two.", "Three", "One", "two.", "Three", "One"]
    assert Haystack(["One two.", "Three"]).essay(3, start=4).words == ["Three", "One", "two."]


def test_only_as_many_documents_are_read_as_are_needed(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 10)
    assert len(read_haystack([str(tmp_path)], words=11).documents) == 2
    assert len(read_haystack([str(tmp_path)]).documents) == 3


def written(path, **options):
    arguments = {"variants": list(VARIANTS), "lengths": [600, 800], "items": 12}
    source = path.parent / "book.txt"
    source.write_text(BOOK)
    write_needles(path, haystack=[str(source)], **{**arguments, **options})
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_training_text_ends_with_the_value_and_is_prepared(tmp_path):
    texts = written(tmp_path / "a.jsonl")
    assert len(texts) == 12
    for text in texts:
        asked, value = text.removesuffix(".").rsplit(" mentioned in the provided text is ", 1)
        key = asked.rsplit(" for ", 1)[1]
        assert f"s for {key} is: {value}." in text
        assert {part_of(key), part_of(value)} == {"train"}
    assert len({"grass is green" in text for text in texts}) == 2
    assert len({len(text) // 200 for text in texts}) > 1
    corpus = prepare_corpus([tmp_path / "a.jsonl"], tmp_path / "corpus", validation=0)
    assert corpus.train.documents == 12
    assert corpus.train.tokens == sum(len(text.encode()) + 1 for text in texts)


def test_training_text_is_repeatable_and_fewer_are_a_prefix(tmp_path):
    texts = written(tmp_path / "a.jsonl")
    assert written(tmp_path / "b.jsonl") == texts
    assert written(tmp_path / "c.jsonl", items=5) == texts[:5]
    assert written(tmp_path / "d.jsonl", seed=1) != texts


def test_brief_items_are_a_needle_a_few_words_and_the_question(tmp_path):
    texts = written(tmp_path / "a.jsonl", items=60, brief=0.5)
    short = [text for text in texts if text.startswith("One of the special magic ")]
    assert 15 < len(short) < 45
    form = r"One of the special magic (\w+)s for (\S+) is: (\S+)\. ?(.*?) ?The special magic"
    for text in short:
        kind, key, value, words = re.match(form, text).groups()
        asked = f"magic {kind} for {key} mentioned in the provided text is {value}."
        assert text.endswith(asked)
        assert text.count(asked) == 2
        assert len(words.split()) <= BRIEF_WORDS
        assert {part_of(key), part_of(value)} == {"train"}
    # The others are the items of a file without brief ones.
    others = set(texts) - set(short)
    assert others
    assert others <= set(written(tmp_path / "b.jsonl", items=60))
    with pytest.raises(ValueError, match="brief must be a share from 0 to 1; got 2"):
        written(tmp_path / "c.jsonl", brief=2)
    assert not (tmp_path / "c.jsonl").exists()


def test_an_existing_file_is_replaced_only_on_demand(tmp_path):
    texts = written(tmp_path / "a.jsonl", items=2)
    with pytest.raises(FileExistsError, match=r"a\.jsonl exists: .* --force"):
        written(tmp_path / "a.jsonl", items=3)
    assert len(texts) == 2
    assert len(written(tmp_path / "a.jsonl", items=3, force=True)) == 3
    with pytest.raises(ValueError, match="too short"):
        written(tmp_path / "a.jsonl", lengths=[400], force=True)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "book.txt"]


def test_bad_arguments_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"variants must be among passkey.*got 'digits'"):
        written(tmp_path / "a.jsonl", variants=["digits"])
    with pytest.raises(ValueError, match=r"a length of 300 is too short for uuid: .* tokens"):
        needles().item("uuid", 300, 0)
    with pytest.raises(ValueError, match="part must be train or test; got 'validation'"):
        needles("validation")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"the haystack has no words: .*blank\.txt"):
        read_haystack([str(tmp_path / "blank.txt")])
    needles_module.word_lists.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ModuleNotFoundError, match=r"trellis-memory\[eval\]"):
        draw(random.Random(0), "word", "test")


def test_the_command_writes_a_file(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK)
    out = tmp_path / "needles.jsonl"
    command = [
        "data", "needles", "--out", str(out), "--haystack", str(tmp_path / "book.txt"),
        "--variants", "passkey, uuid", "--lengths", "600,800", "--items", "7",
    ]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert "7 documents, 0.0 MB written to" in result.output
    assert len(out.read_text().splitlines()) == 7
    assert isinstance(CliRunner().invoke(app, command).exception, FileExistsError)
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0


def test_a_folder_is_named_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.needles.read_haystack", None)
    command = ["data", "needles", "--out", str(tmp_path), "--force"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, ValueError)
    assert f"--out must be a file; {tmp_path} is a folder" in str(error)


def test_the_commands_own_lengths_fit_its_tokenizer(tmp_path, monkeypatch):
    # The standard library, which is the haystack, takes seconds to read.
    monkeypatch.setattr("trellis.data.needles.read_haystack", lambda _: HAYSTACK)
    out = tmp_path / "needles.jsonl"
    command = ["data", "needles", "--out", str(out), "--items", "2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    assert all(800 < len(line) < 2100 for line in out.read_text().splitlines())
