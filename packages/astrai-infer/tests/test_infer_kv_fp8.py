"""Keys and values in float8_e4m3fn with a scale per token and head: what is stored, what it takes, what it costs."""

from __future__ import annotations

import pytest
import torch

from astrai_core import SamplingParams, ops
from astrai_core.types import Request
from astrai_infer.testing import small_engine, tiny_model


@torch.no_grad()
def test_what_is_stored_is_within_half_a_step_of_the_key():
    """Each token and head uses the whole range of the type, however small or large its keys are; zeros stay zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-4, 1.0, 300.0, 0.0]).view(4, 1)
    qkv = torch.randn(4, 4 * 8, generator=generator) * sizes
    k_buffer, v_buffer = (torch.zeros(9, 1, 8, dtype=torch.float8_e4m3fn) for _ in range(2))
    k_scale, v_scale = (torch.full((9, 1), float("nan")) for _ in range(2))
    locs = torch.tensor([5, 0, 7, 2])
    norms = {"rope": None, "q_norm": None, "k_norm": None, "eps": 1e-6}
    ops.qkv_norm_rope_write(qkv, k_buffer, v_buffer, locs, 2, 1, **norms, k_scale=k_scale, v_scale=v_scale)
    heads = qkv.view(4, 4, 8)
    for buffer, scale, wanted in ((k_buffer, k_scale, heads[:, 2:3]), (v_buffer, v_scale, heads[:, 3:])):
        torch.testing.assert_close(scale[locs], wanted.abs().amax(-1) / 448)
        found = buffer.float()[locs] * scale[locs].unsqueeze(-1)
        # Three bits behind the leading one, and steps of 2 ** -9 next to zero.
        error, step = (found - wanted).abs(), (wanted.abs() / 16).maximum(scale[locs].unsqueeze(-1) * 2.0**-10)
        assert (error <= 1.01 * step).all()
    assert k_scale[[1, 3, 4, 6, 8]].isnan().all(), "nothing else is written"


def test_a_page_takes_half_the_memory_and_its_scales():
    plain = small_engine(tiny_model(), kv_dtype="bfloat16")
    narrow = small_engine(tiny_model(), kv_dtype="float8_e4m3fn")
    spec, narrow_spec = (engine.pool.groups[0].spec for engine in (plain, narrow))
    assert spec.token_bytes == 2 * 2 * 2 * 8 * 2
    assert narrow_spec.token_bytes == 2 * 2 * 2 * (8 + 4)
    storage = narrow.pool.groups[0].storage
    n_bytes = sum(t.nbytes for t in (storage.k_buffer, storage.v_buffer, storage.k_scale, storage.v_scale))
    assert n_bytes == storage.size * narrow_spec.token_bytes
    narrow.sleep()
    assert storage.k_scale.numel() == storage.k_buffer.numel() == 0
    narrow.resume()
    assert storage.k_scale.shape == storage.k_buffer.shape[:-1]


@pytest.mark.parametrize("model", [{}, {"model_type": "mistral", "sliding_window": 9}], ids=["full", "window"])
def test_the_text_begins_as_without(model):
    """Log-probabilities of the first tokens stay close, in chunks and with a window; they are not the same."""
    found = []
    for kv_dtype in ("auto", "float8_e4m3fn"):
        engine = small_engine(
            tiny_model(**model), max_num_seqs=3, max_batch_tokens=24, kv_dtype=kv_dtype, prefix_cache=False
        )
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        prompts = [tuple(range(start, start + 40)) for start in (3, 50, 90)]
        completions = engine.scheduler.run_batch([Request(prompt_token_ids=ids, params=params) for ids in prompts])
        found.append(torch.tensor([[e.logprob for e in c.prompt_logprobs[1:]] for c in completions]))
    difference = (found[0] - found[1]).abs()
    assert difference.max() > 0
    assert difference.mean() < 0.05 * found[0].std()
