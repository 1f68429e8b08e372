"""Groups of layers (decision 4): attention windows in a small pool give transformers' tokens, and their pages come back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astrai_core import AutoModel, SamplingParams
from astrai_core.errors import ConfigError, RequestError
from astrai_core.types import Request
from astrai_infer import InferenceEngine
from astrai_infer.cache.pool import PagePool
from astrai_infer.cache.sizing import plan_cache
from astrai_infer.cache.storage import KVSpec
from astrai_infer.config import EngineConfig
from astrai_infer.testing import EOS_ID, VOCAB_SIZE, ScriptedModel, byte_tokenizer, tiny_model

PROMPTS = [list(range(10 + i, 10 + i + length)) for i, length in enumerate([1, 19, 40, 90])]
N_NEW = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)
FAMILIES = {
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}
"""All layers with a window; one full layer before two with a window."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """Our model, and the greedy tokens of transformers, one prompt at a time."""
    transformers = pytest.importorskip("transformers")
    config_class, extra = FAMILIES[request.param]
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        bos_token_id=None,
        **extra,
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)  # so that few logits are near ties
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=N_NEW, eos_token_id=VOCAB_SIZE + 1
        )
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    return AutoModel.from_pretrained(directory, device="cpu"), expected


def engine(model, kv_tokens: dict[str, int] | None = None, **config) -> InferenceEngine:
    """Return an engine whose groups hold as many tokens as `kv_tokens` says by kind, in pages of 8."""
    config = {"prefix_cache": False, "page_size": 8} | config
    if kv_tokens is not None:
        specs = KVSpec.groups(model.config, torch.float32)
        config["kv_cache_bytes"] = sum(spec.token_bytes * kv_tokens[spec.kind] for spec in specs)
    return InferenceEngine(model, byte_tokenizer(), EngineConfig(**config))


def poison(pool: PagePool) -> None:
    """Make every slot and table entry that is nobody's unreadable: a slot is NaN, an entry points out of the storage."""

    def spoil(group, pages: list[int]) -> None:
        for page in pages:
            slots = slice(page * pool.page_size, (page + 1) * pool.page_size)
            group.storage.k_buffer[:, slots] = group.storage.v_buffer[:, slots] = torch.nan
            table = group.req_to_token.host
            table[(table >= slots.start) & (table < slots.stop)] = 2**30

    for group in pool.groups:
        assert group.spec.kind == "full" or group.allocator.n_pages * pool.page_size < 256
        group.req_to_token.host[:] = 2**30
        spoil(group, range(group.allocator.n_pages))
        release = group.allocator.release

        def release_and_spoil(pages, keep=lambda page: False, group=group, release=release):
            pages = list(pages)
            release(pages, keep)
            spoil(group, pages)

        group.allocator.release = release_and_spoil


@pytest.mark.parametrize(
    ("kv_tokens", "config"),
    [
        ({"full": 256, "window": 48}, {"max_num_seqs": 1, "max_batch_tokens": 16}),
        ({"full": 1024, "window": 160}, {"max_num_seqs": 4, "max_batch_tokens": 64}),
        ({"full": 1024, "window": 160}, {"max_num_seqs": 4, "max_batch_tokens": 5}),
        ({"full": 312, "window": 72}, {"max_num_seqs": 4, "max_batch_tokens": 16}),
        ({"full": 1024, "window": 160}, {"max_num_seqs": 4, "max_batch_tokens": 64, "page_size": 1}),
    ],
    ids=["alone", "batched", "chunked", "preempted", "page1"],
)
def test_a_pool_smaller_than_the_sequence_gives_transformers_tokens(case, kv_tokens, config, request):
    """Rules 1 and 6: a window's pages are reused under a running request, and nothing that went back is read."""
    model, expected = case
    with engine(model, kv_tokens, **config) as subject:
        assert subject.pool.capacity == 256
        poison(subject.pool)
        results = subject.generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == expected
        assert all(result.finish_reason == "length" for result in results)
        assert subject.pool.n_used == 0, "every page came back"
        assert subject.pool.n_free == subject.pool.n_pages
        if "preempted" in request.node.callspec.id:
            assert subject.scheduler.n_preemptions > 0


@pytest.mark.parametrize("config", [{"prefix_cache": True}, {"cache_mode": "contiguous"}], ids=["prefix", "contiguous"])
def test_whole_sequences_stay_in_one_group(case, config):
    """Rules 1 and 8, row C6: the prefix cache and the contiguous mode keep every position, and say the same."""
    model, expected = case
    with engine(model, max_num_seqs=4, **config) as subject:
        assert [group.spec.kind for group in subject.pool.groups] == ["full"]
        for _ in range(2):
            assert [result.token_ids for result in subject.generate(PROMPTS, GREEDY)] == expected


def test_pages_come_back_while_the_request_runs(case):
    """A window of 20 in pages of 8 needs 4 pages for decoding, however long the sequence; health counts them."""
    model, expected = case
    subject = engine(model, max_num_seqs=2, max_batch_tokens=16)
    request = Request(prompt_token_ids=tuple(PROMPTS[3]), params=GREEDY)
    done = []
    subject.scheduler.submit(subject.tasks.make(request, lambda delta: done.append(delta.completion)))
    window = next(group for group in subject.pool.groups if group.spec.kind == "window")
    used = []
    while subject.scheduler.step():
        health = subject.health()
        assert health.n_pages_free + health.n_pages_cached + health.n_pages_used == subject.pool.n_pages
        for group in subject.pool.groups:
            allocator = group.allocator
            assert allocator.n_free + allocator.n_cached + allocator.n_used == allocator.n_pages
            if group is not window and done[-1:] == [None]:
                assert allocator.n_used == -(-(89 + len(done)) // 8), "a full layer keeps everything"
        used.append(window.allocator.n_used)
    assert done[-1].token_ids == expected[3]
    assert max(used) <= 4, "what a chunk needs beyond the window is back after its step"
    assert used[-1] == 0
    subject.close()


def plan(budget: int | None, **config):
    """Size the cache of one full layer and two with a window of 20; a token of a layer takes 128 bytes."""
    model = ScriptedModel(
        lambda token, position: 0,
        model_type="qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    )
    settings_ = {"prefix_cache": False, "page_size": 8, "max_num_seqs": 8, "max_batch_tokens": 32} | config
    return plan_cache(model, EngineConfig(kv_cache_bytes=budget, **settings_))


PAGE_BYTES = (8 * 128, 8 * 256)
ONE = (32, (20 + 32 - 3 + 8) // 8 + 1)
"""Pages of one sequence of the context, 256 tokens, per group."""


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 600_000))
def test_the_budget_is_split_so_that_no_group_is_the_bottleneck(extra):
    """Both groups hold a sequence of the context, and run full at the same number of sequences."""
    budget = extra + sum(n * size for n, size in zip(ONE, PAGE_BYTES, strict=True))
    full, window = plan(budget).n_pages
    assert full * PAGE_BYTES[0] + window * PAGE_BYTES[1] <= budget
    every = (8 * 32, 8 * 5 + 4)
    assert ONE[0] <= full <= every[0]
    assert ONE[1] <= window <= every[1]
    shares = [(n - one) / (most - one) for n, one, most in zip((full, window), ONE, every, strict=True)]
    assert abs(shares[0] - shares[1]) <= 1 / (every[1] - ONE[1])
    unused = budget - full * PAGE_BYTES[0] - window * PAGE_BYTES[1]
    assert (full, window) == every or unused < sum(PAGE_BYTES), "memory is not left lying"


def test_memory_for_less_than_the_context():
    """Rule 6: the capacity is what one request really can hold, and refusals name it in numbers."""
    subject = plan(20 * PAGE_BYTES[0] + ONE[1] * PAGE_BYTES[1])
    assert subject.n_pages == (20, ONE[1])
    pool = PagePool(subject.specs, subject.n_pages, 8, 8, 256, torch.device("cpu"), chunk_len=32, prefix_cache=False)
    assert pool.capacity == 160
    assert plan(3 * sum(PAGE_BYTES)).n_pages == (3, 3), "less than a window and a chunk: both hold the same tokens"
    with pytest.raises(ConfigError, match=f"the KV cache has 100 bytes, one page needs {sum(PAGE_BYTES)}"):
        plan(100)
    model = tiny_model(model_type="mistral", sliding_window=20)
    with engine(model, {"window": 24}, max_num_seqs=2, max_batch_tokens=16) as small:
        with pytest.raises(RequestError, match="prompt has 40 tokens, the KV cache holds 24"):
            small.generate(PROMPTS[2], GREEDY)
        assert len(small.generate(PROMPTS[1], GREEDY).token_ids) == 5, "it ends with the cache"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 4, 16]),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_pages_for_all_are_enough(page_size, window, n_seqs, extra, chance):
    """As many sequences of the context as may run at once never want for a page, however a step's budget is cut."""
    budget = n_seqs + extra
    spec = KVSpec("window", (0,), 1, 2, torch.float32, window)
    n_pages = spec.pages_for_all(n_seqs, 64, page_size, budget)
    pool = PagePool([spec], [n_pages], page_size, n_seqs, 64, torch.device("cpu"), chunk_len=budget, prefix_cache=False)
    rows = [pool.admit([1], "w")[0] for _ in range(n_seqs)]
    while any(pool.length(row) < 64 for row in rows):
        left = budget - n_seqs
        chance.shuffle(rows)
        for row in rows:
            n = min(1 + chance.randint(0, left), 64 - pool.length(row))
            left -= max(0, n - 1)
            assert pool.extend(row, n)
        for row in rows:
            pool.record(row, (), pool.length(row))


def test_layers_of_the_two_kinds_are_told_apart():
    """Interleaved layers: each attends through the table of its own group."""
    model = tiny_model(
        model_type="smollm3",
        num_hidden_layers=4,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=8,
        pad_token_id=0,
    )
    assert [spec.layers for spec in KVSpec.groups(model.config, torch.float32)] == [(0, 2), (1, 3)]
    with engine(model, {"full": 256, "window": 40}, max_num_seqs=2, max_batch_tokens=16) as subject:
        poison(subject.pool)
        results = subject.generate(PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *result.token_ids]])).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == result.token_ids
    assert len({*itertools.chain(*(result.token_ids for result in results))}) > 20, "the text wanders"
