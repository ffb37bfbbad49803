import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Lfm2Config, Lfm2ForCausalLM

from switchhead.data import ByteSubsetVocabulary
from switchhead.eval import Request, encode_request, score_continuations

TEXTS = [("", "a"), ("", "ab"), ("It was", " a dark night"), ("It was", " a dog"), ("One", " word"), ("It was a", " d")]
KINDS = [
    {},
    {"attention": "mha", "num_experts": None},
    {"positions": "relative", "memory_length": 8, "max_position_embeddings": 8},
]


@torch.no_grad()
def one_by_one(model, request):
    """Log-likelihood and greedy match, each token by a forward over all that comes before it."""
    tokens = [*request.context, *request.continuation]
    total, greedy = 0.0, True
    for i in range(len(request.context), len(tokens)):
        scores = model(torch.tensor([tokens[:i]])).logits[0, -1].log_softmax(-1)
        total += scores[tokens[i]].item()
        greedy &= int(scores.argmax()) == tokens[i]
    return total, greedy


@pytest.mark.parametrize("kind", KINDS[:2], ids=["switchhead", "mha"])
@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_likelihoods_are_those_of_one_forward_a_token(make_model, vocabulary, kind, batch_size):
    model = make_model(**{"max_position_embeddings": 64, **kind})
    requests = [encode_request(vocabulary, *text) for text in TEXTS]
    found = score_continuations(model, requests, batch_size=batch_size)
    for request, likelihood in zip(requests, found, strict=True):
        expected, greedy = one_by_one(model, request)
        assert likelihood.log_likelihood == pytest.approx(expected, rel=1e-9)
        assert (likelihood.greedy, likelihood.cut) == (greedy, 0)


@torch.no_grad()
def test_transformer_xl_reads_contexts_of_any_length_chunk_by_chunk(make_model, vocabulary):
    model = make_model(**KINDS[2])
    requests = [encode_request(vocabulary, "Once upon a time " * n, " there was") for n in (3, 1, 5)]
    for request, likelihood in zip(requests, score_continuations(model, requests), strict=True):
        tokens = torch.tensor([[*request.context, *request.continuation]])
        memory, scores = None, []
        for chunk in tokens[:, :-1].split(8, dim=1):
            output = model(chunk, memory=memory)
            memory = output.memory
            scores.append(output.logits.log_softmax(-1))
        n = len(request.continuation)
        expected = torch.cat(scores, dim=1)[0, -n:].gather(1, tokens[0, -n:, None]).sum().item()
        assert likelihood.log_likelihood == pytest.approx(expected, rel=1e-9)
        assert likelihood.cut == 0


def test_the_greedy_continuation_is_known_as_such(make_model, vocabulary):
    model = make_model(max_position_embeddings=64)
    context = [vocabulary.beginning, *b"Once"]
    ids = list(context)
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    greedy, other = ids[len(context) :], [*ids[len(context) : -1], (ids[-1] + 1) % 256]
    found = score_continuations(
        model, [Request(context, greedy), Request(context, other), Request(context, greedy[:1])]
    )
    assert [likelihood.greedy for likelihood in found] == [True, False, True]


def test_texts_that_differ_in_their_end_are_read_once(make_model, vocabulary):
    model = make_model(max_position_embeddings=64)
    read = []
    model.register_forward_pre_hook(lambda _, __, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True)
    texts = ["The cat sat", "The cat sit", "The cat", "A dog"]
    score_continuations(model, [encode_request(vocabulary, "", text) for text in texts])
    (inputs,) = read
    assert len(inputs) == 3  # "The cat sa", "The cat si", "A do"


SHARED = [
    *(
        ("The cat sat on the mat, and there it was. " * 2, end)
        for end in (" A dog ran", " A dog", " No one, in truth.")
    ),
    *(("On that day a cat went up the hill, where" + context, " he sat") for context in (" once", " twice")),
    *(("Far away, in a land that nobody has seen yet", end) for end in (" a king", " a queen")),
    ("Short", " word"),
    ("On that day a cat went", " down"),
]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=128, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5)
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.parametrize("batch_size", [1, 2, 4, None])
@pytest.mark.parametrize("kind", ["rotary", "relative", "gpt2"])
def test_likelihoods_behind_shared_contexts_are_those_of_one_forward_a_token(make_model, vocabulary, kind, batch_size):
    model = gpt2() if kind == "gpt2" else make_model(positions=kind, max_position_embeddings=128)
    requests = [encode_request(vocabulary, *text) for text in SHARED]
    for request, found in zip(requests, score_continuations(model, requests, batch_size=batch_size), strict=True):
        expected, greedy = one_by_one(model, request)
        assert found.log_likelihood == pytest.approx(expected, rel=1e-9)
        assert found.greedy == greedy


def test_models_with_a_recurrent_state_read_every_text_whole(vocabulary):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    model = Lfm2ForCausalLM(Lfm2Config(vocab_size=257, max_position_embeddings=128, **sizes, **layers)).double().eval()
    requests = [encode_request(vocabulary, *text) for text in SHARED[:2]]
    for request, found in zip(requests, score_continuations(model, requests), strict=True):
        assert found.log_likelihood == pytest.approx(one_by_one(model, request)[0], rel=1e-9)


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_transformer_xl_reads_shared_contexts_as_it_reads_each(make_model, vocabulary, batch_size):
    model = make_model(**KINDS[2])
    requests = [encode_request(vocabulary, *text) for text in SHARED]
    alone = [score_continuations(model, [request])[0].log_likelihood for request in requests]
    together = score_continuations(model, requests, batch_size=batch_size)
    assert [found.log_likelihood for found in together] == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(("kind", "step"), [({}, 32), (KINDS[2], 8)], ids=["cache", "memory"])
def test_a_context_that_continuations_share_is_read_once(make_model, vocabulary, kind, step):
    model = make_model(**{"max_position_embeddings": 1024, **kind})
    read = []
    model.register_forward_pre_hook(lambda _, __, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True)
    context = "Once upon a time there was a cat. " * 10
    requests = [encode_request(vocabulary, context, f" {letter} cat.") for letter in "abcdefghij"]
    score_continuations(model, requests)
    assert sum(read) < 341 + 10 * (step + 7)


def test_contexts_that_are_too_long_are_cut_on_the_left_and_counted(make_model, vocabulary):
    model = make_model(max_position_embeddings=8)
    request = encode_request(vocabulary, "0123456789", " ab")
    (likelihood,) = score_continuations(model, [request])
    assert likelihood.cut == 5  # 1 + 10 + 3 tokens: 13 inputs, of which the model reads 8
    short = Request(request.context[5:], request.continuation)
    assert likelihood.log_likelihood == pytest.approx(one_by_one(model, short)[0])


def test_a_continuation_longer_than_the_model_is_scored_in_pieces(make_model, vocabulary):
    model = make_model(max_position_embeddings=8)
    tokens = [256, *b"0123456789abcdef"]
    pieces = [Request(tokens[:1], tokens[1:9]), Request(tokens[4:9], tokens[9:13]), Request(tokens[8:13], tokens[13:])]
    expected = [one_by_one(model, piece) for piece in pieces]
    (likelihood,) = score_continuations(model, [Request(tokens[:1], tokens[1:])])
    assert likelihood.log_likelihood == pytest.approx(sum(value for value, _ in expected))
    assert likelihood.cut == 8  # 16 inputs, of which the last token is scored after 8


def test_requests_are_behind_the_beginning_token_and_take_spaces_into_the_continuation(vocabulary):
    assert encode_request(vocabulary, "ab ", "c") == ([256, *b"ab"], [*b" c"])
    assert encode_request(vocabulary, "", "ab") == ([256], [*b"ab"])


def test_without_a_beginning_token_the_first_token_is_context():
    bytes_of_text = ByteSubsetVocabulary(b"abc")
    assert encode_request(bytes_of_text, "", "cab") == ([2], [0, 1])
    assert encode_request(bytes_of_text, "c", "ab") == ([2], [0, 1])
    with pytest.raises(ValueError, match="'c' tokenises to nothing that could be scored"):
        encode_request(bytes_of_text, "", "c")


class MergingVocabulary:
    """Letters, and one token for "bc"."""

    beginning = None

    def encode(self, text):
        ids = [100 if piece == "*" else ord(piece) for piece in text.replace("bc", "*")]
        return torch.tensor(ids).numpy()


def test_a_token_across_the_border_belongs_to_the_continuation():
    assert encode_request(MergingVocabulary(), "ab", "cd") == ([ord("a")], [100, ord("d")])


def test_scoring_leaves_the_models_mode_and_random_numbers_alone(make_model, vocabulary):
    model = make_model(dropout=0.5, max_position_embeddings=64).train()
    state = torch.get_rng_state()
    request = encode_request(vocabulary, "It was", " here")
    assert score_continuations(model, [request]) == score_continuations(model, [request])
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("setting", ["batch_size", "chunk_length"])
def test_a_setting_below_one_is_named(make_model, vocabulary, setting):
    with pytest.raises(ValueError, match=f"{setting} is 0"):
        score_continuations(make_model(), [encode_request(vocabulary, "", "a")], **{setting: 0})
