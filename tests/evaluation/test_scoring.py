import pytest
import torch
from tests.support import RuleNetwork, evaluated_model, save_gpt2
from transformers import MambaConfig, MambaForCausalLM

from trellis.data.tokenizer import load_tokenizer
from trellis.evaluation.models import EvaluatedModel, check_exists, open_model
from trellis.evaluation.scoring import batches, complete, score

CONTEXT = b"the cat sat on the "
REQUESTS = [
    (list(CONTEXT), list(b"mat")),
    (list(CONTEXT), list(b"x")),
    (list(b"a"), list(b"bcdef")),
    (list(CONTEXT), list(b"mattress and slept")),
    (list(b"another beginning"), list(b" of it")),
]


@pytest.fixture(params=["trellis", "transformer", "ttt", "gpt2"])
def model(request, tmp_path):
    if request.param == "gpt2":
        return open_model(str(save_gpt2(tmp_path / "gpt2")))
    return evaluated_model(request.param)


def alone(model, context, continuation):
    """The definition: one call, every token of the continuation from all before it."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        chances = model.network(ids).logits[0].double().log_softmax(-1)
    total, greedy = 0.0, True
    for place, token in enumerate(continuation, len(context) - 1):
        total += float(chances[place, token])
        greedy = greedy and int(chances[place].argmax()) == token
    return total, greedy


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_scores_are_those_of_one_call_each(model, share, batch_tokens):
    found = score(model, REQUESTS, batch_tokens=batch_tokens, share=share)
    for result, request in zip(found, REQUESTS):
        likelihood, greedy = alone(model, *request)
        assert result.likelihood == pytest.approx(likelihood, rel=1e-5)
        assert result.greedy == greedy


def test_what_is_likeliest_is_greedy(model):
    context = list(b"once upon a time")
    ids = list(context)
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model.network(torch.tensor([ids])).logits[0, -1].argmax()))
    (result,) = score(model, [(context, ids[len(context) :])])
    assert result.greedy


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_completions_are_those_of_one_token_after_another(model, batch_tokens):
    prompts = [list(b"once"), list(b"upon a time there"), list(b"was a mouse")]
    found = complete(model, prompts, max_tokens=12, batch_tokens=batch_tokens)
    for prompt, text in zip(prompts, found):
        ids = list(prompt)
        decoder, expected = model.tokenizer.stream_decoder(), ""
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model.network(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == model.tokenizer.end_of_document:
                break
            expected += decoder.feed(ids[-1])
        assert text == expected


def test_a_stop_ends_a_completion(model):
    (whole,) = complete(model, [list(b"hello")], max_tokens=20)
    middle = whole[len(whole) // 2]
    (cut,) = complete(model, [list(b"hello")], max_tokens=20, stop=middle)
    assert cut == whole[: whole.index(middle)]


def test_a_completion_ends_as_soon_as_enough_is_known(model):
    prompts = [list(b"hello"), list(b"good day")]
    whole = complete(model, prompts, max_tokens=12)
    cut = complete(model, prompts, max_tokens=12, enough=lambda n, text: n == 1 and len(text) > 2)
    assert cut[0] == whole[0]
    assert 2 < len(cut[1]) < len(whole[1])
    assert whole[1].startswith(cut[1])


def test_tokens_that_the_tokenizer_does_not_know_are_no_text():
    vocabulary = load_tokenizer("bytes").vocab_size
    following = {"a": vocabulary + 3, vocabulary + 3: "b", "b": vocabulary}
    by_id = {ord(k) if isinstance(k, str) else k: v for k, v in following.items()}
    rule = {k: ord(v) if isinstance(v, str) else v for k, v in by_id.items()}
    network = RuleNetwork(lambda ids: rule.get(ids[-1], ord("c")), vocabulary + 10)
    model = EvaluatedModel("wide", network, load_tokenizer("bytes"), {})
    assert complete(model, [list(b"a")], max_tokens=4) == ["bc"]


def test_a_prompt_is_read_once_whatever_a_model_calls_its_cache():
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.5
    )
    model = EvaluatedModel("mamba", MambaForCausalLM(config), load_tokenizer("bytes"), {})
    ids = list(b"once upon")
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model.network(torch.tensor([ids])).logits[0, -1].argmax()))
    read = []
    model.network.backbone.embeddings.register_forward_pre_hook(
        lambda _, args: read.append(args[0].shape[1])
    )
    (text,) = complete(model, [list(b"once upon")], max_tokens=6)
    assert read == [9, 1, 1, 1, 1, 1]
    assert text == model.tokenizer.stream_decoder().feed(ids[9:])


def test_bad_requests_are_named(tmp_path):
    model = open_model(str(save_gpt2(tmp_path / "gpt2", positions=10)))
    with pytest.raises(ValueError, match="at least one token each"):
        score(model, [([], [1])])
    with pytest.raises(ValueError, match="a prompt must have at least one token"):
        complete(model, [[]], max_tokens=1)
    with pytest.raises(ValueError, match=r"a request has 12 tokens.*reads at most 10"):
        score(model, [([1] * 8, [1] * 5)])
    with pytest.raises(ValueError, match=r"a prompt with its answer has 18 tokens"):
        complete(model, [[1] * 8], max_tokens=10)
    with pytest.raises(FileNotFoundError, match="there is no run and no model"):
        check_exists("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="neither a run nor a model"):
        check_exists(str(tmp_path / "empty"))


def test_batches_hold_everything_once_and_fit():
    lengths = [3, 9, 1, 4, 4, 20, 2]
    found = list(batches(lengths, 12))
    assert sorted(n for group in found for n in group) == list(range(7))
    for group in found:
        assert len(group) == 1 or len(group) * max(lengths[n] for n in group) <= 12
