"""The engine's steps on a CUDA device: graphs, memory, nothing allocated and nothing waited for (W1, G1-G4, G6, C5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from astrai_core import SamplingParams
from astrai_core.auto import AutoModel
from astrai_core.errors import ConfigError
from astrai_core.model.transformer import CausalLM
from astrai_core.types import Completion, Request
from astrai_infer import EngineConfig, InferenceEngine
from astrai_infer.runtime.device import DeviceExecutor
from astrai_infer.runtime.shapes import StepShape
from astrai_infer.speculation import NgramDrafter
from astrai_infer.task import Task
from astrai_infer.testing import byte_tokenizer
from astrai_infer.testing.device import steady
from astrai_infer.testing.models import GPU_SIZES, gpu_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.kernel]

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "head_dim": 64,
}


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return gpu_model()


def engine_of(model: CausalLM, **config) -> InferenceEngine:
    settings = {"max_num_seqs": 16, "max_batch_tokens": 256, "kv_cache_bytes": 1 << 26, "prefix_cache": False} | config
    return InferenceEngine(model, byte_tokenizer(), EngineConfig(**settings))


def executor_of(engine: InferenceEngine) -> DeviceExecutor:
    executor = engine.scheduler.executor
    assert isinstance(executor, DeviceExecutor)
    return executor


def requests(n: int, **params) -> list[Request]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2} | params
    return [
        Request(
            prompt_token_ids=tuple(range(3 * i, 3 * i + 5 + 7 * i % 60)),
            params=SamplingParams(max_tokens=20 + i, seed=i, **sampling),
            request_id=f"r{i}",
        )
        for i in range(n)
    ]


def answers(completions: list[Completion]) -> list[tuple]:
    return [(c.token_ids, [entry.logprob for entry in c.logprobs or ()]) for c in completions]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16])
def test_graphs_and_eager_agree_bit_for_bit(model, n):
    """G4: tokens and log-probabilities, in decode and mixed steps, at every batch size."""
    with engine_of(model, cuda_graphs=True) as captured, engine_of(model, cuda_graphs=False) as eager:
        expected = answers(eager.scheduler.run_batch(requests(n)))
        for _ in range(3):  # mixed shapes are captured when they come a second time
            assert answers(captured.scheduler.run_batch(requests(n))) == expected
        assert len(executor_of(captured).graphs) > len(executor_of(captured).buckets.first)
        assert len(executor_of(eager).graphs) == 0
    assert len({tokens for tokens, _ in expected}) == n, "the prompts have answers of their own"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {65: 4.0}},
    ],
    ids=["top_k", "top_p", "penalties", "rules"],
)
def test_sampling_agrees_and_repeats(model, params):
    """G5, rule 2: draws are a function of seed and position, captured or not."""
    with engine_of(model, cuda_graphs=True) as captured, engine_of(model, cuda_graphs=False) as eager:
        expected = answers(eager.scheduler.run_batch(requests(6, **params)))
        for _ in range(3):
            assert answers(captured.scheduler.run_batch(requests(6, **params))) == expected


@torch.no_grad()
def test_the_tokens_are_those_of_a_dense_forward(model):
    """Rule 1: each token is a largest logit of the whole sequence's forward, within roundings of bf16."""
    with engine_of(model) as engine:
        completions = engine.scheduler.run_batch(requests(12))
    for request, completion in zip(requests(12), completions, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]], device="cuda")
        logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(request.prompt_token_ids) :, None]).squeeze(1)
        tolerance = 8 * torch.finfo(torch.bfloat16).eps * logits.abs().amax(1)
        assert (chosen >= logits.amax(1) - tolerance).all()


def test_decode_graphs_are_there_before_the_first_request(model):
    """G1, G3: what only decodes is captured at the start, mixed shapes on their second use."""
    with engine_of(model, max_num_seqs=20) as engine:
        graphs = executor_of(engine).graphs
        for variant in ("greedy", "random"):
            sizes = [n for n in range(33) if graphs.has_graph(("sample", StepShape(n), variant))]
            assert sizes == [1, 2, 4, 8, 12, 16, 20]
        assert all(graphs.has_graph(("forward", StepShape(n))) for n in sizes)
        n_before = len(graphs)
        for n in (12, 12, 12):
            engine.scheduler.run_batch(requests(n))
        assert len(graphs) > n_before


def steady_engine(model: CausalLM, n: int, config: dict[str, Any] | None = None, **params) -> InferenceEngine:
    engine = engine_of(model, **(config or {}))
    for request in requests(n, **({"logprobs": None} | params)):
        longer = Request(
            prompt_token_ids=request.prompt_token_ids,
            params=SamplingParams(temperature=request.params.temperature, max_tokens=300, ignore_eos=True, **params),
        )
        engine.scheduler.submit(engine.tasks.make(longer, lambda delta: None))
    for _ in range(40):
        engine.scheduler.step()
    assert len(engine.scheduler.running) == n
    return engine


@pytest.mark.parametrize("n", [1, 7, 16])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 20}, {"frequency_penalty": 0.5}], ids=["greedy", "top_k", "penalties"]
)
def test_a_steady_step_allocates_nothing_and_waits_for_nothing(model, n, params):
    """W1, C5: by the allocator's counters, and by torch's detector of synchronising calls. Steps on which a request
    takes a new page send the change of its table along, in one more launch."""
    engine = steady_engine(model, n, **params)
    try:
        torch.cuda.synchronize()
        with steady():
            for _ in range(40):
                engine.scheduler.step()
    finally:
        engine.close()


def test_the_memory_asked_for_is_kept_and_used(model):
    """G6: what steps need is measured first; the cache takes what is left of the share, and the engine stays within it.
    Other processes may use the card meanwhile, as other tests do: torch's own count is compared, with room for them."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    share = 0.05 * free
    config = {"kv_cache_bytes": None, "memory_fraction": 0.05, "max_num_seqs": 4096, "max_batch_tokens": 4096}
    with engine_of(model, max_seq_len=2048, prefix_cache=True, **config) as engine:
        cache = sum(group.storage.k_buffer.nbytes + group.storage.v_buffer.nbytes for group in engine.pool.groups)
        assert 4096 * 2048 * engine.pool.groups[0].spec.token_bytes > share, "not all requests fit"
        engine.scheduler.run_batch(requests(40))
        taken = torch.cuda.memory_reserved() - held
        # Others may have let go of memory before the engine looked.
        largest = 0.05 * max(free, torch.cuda.mem_get_info()[0] + taken)
    assert taken <= 1.05 * largest
    assert cache >= 0.95 * share - 3 * 2**30


def test_sleep_moves_the_cache_and_graphs_are_made_anew(model):
    """Rule 12: after its memory went and came back, an engine answers as before; cuBLAS, which multiplies 96 rows, may still
    hold memory of the graphs that went."""
    with engine_of(model, max_num_seqs=96) as engine:
        expected = answers(engine.scheduler.run_batch(requests(5)))
        engine.sleep()
        assert len(executor_of(engine).graphs) == 0
        kept = torch.empty(1 << 24, device="cuda")  # the cache may come back elsewhere
        engine.resume()
        assert len(executor_of(engine).graphs) > 0
        assert answers(engine.scheduler.run_batch(requests(5))) == expected
        del kept


def test_new_weights_keep_graphs_and_addresses(model):
    """Rule 12: graphs read the weights where they always were."""
    with engine_of(model) as engine:
        first = answers(engine.scheduler.run_batch(requests(4)))
        n_graphs = len(executor_of(engine).graphs)
        with torch.no_grad():
            saved = model.lm_head.weight.clone()
            with engine.scheduler.between_steps(recompute=True):
                model.lm_head.weight.copy_(saved.roll(1, 0))
            rolled = answers(engine.scheduler.run_batch(requests(4)))
            with engine.scheduler.between_steps(recompute=True):
                model.lm_head.weight.copy_(saved)
        assert rolled != first
        assert answers(engine.scheduler.run_batch(requests(4))) == first
        assert len(executor_of(engine).graphs) >= n_graphs


def test_graphs_asked_for_where_there_can_be_none():
    """Strict: a backend that cannot be captured refuses, and by default the engine runs without."""
    served = AutoModel.from_config(tiny_config(**GPU_SIZES), "bfloat16", "cuda", torch.Generator("cuda")).eval()
    with pytest.raises(ConfigError, match="TorchNativeBackend cannot be captured"):
        engine_of(served, backend="torch_native", cuda_graphs=True)
    with engine_of(served, backend="torch_native") as engine:
        assert not isinstance(engine.scheduler.executor, DeviceExecutor)


class Oracle(NgramDrafter):
    """Guesses what the request said without guessing, every third time with a wrong token in it."""

    def __init__(self, said: dict[str, tuple[int, ...]]) -> None:
        super().__init__(5)
        self.said = said
        self.n_asked = 0

    def propose(self, task: Task, limit: int) -> tuple[int, ...]:
        self.n_asked += 1
        right = list(self.said[task.request_id][task.output_len :][: max(min(limit, 5), 0)])
        if self.n_asked % 3 == 0 and len(right) > 2:
            right[2] = 7
        return tuple(right)


@torch.no_grad()
def test_guessing_gives_tokens_of_the_model(model):
    """Speculation on the device: rows of one sequence share a step and a captured shape; each token is a largest logit."""
    asked = requests(3)
    with engine_of(model) as engine:
        plain = engine.scheduler.run_batch(asked)
        n_plain = engine.scheduler.n_steps
    with engine_of(model, speculation="ngram", max_draft_tokens=5, max_num_seqs=24) as engine:
        for _ in range(3):
            engine.scheduler.drafter = Oracle({c.request_id: c.token_ids for c in plain})
            before = engine.scheduler.n_steps
            completions = engine.scheduler.run_batch(asked)
        assert engine.scheduler.n_steps - before < 0.6 * n_plain, "right guesses save steps"
        assert any(key[1].verifies for key in executor_of(engine).graphs._graphs)
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]], device="cuda")
        logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(request.prompt_token_ids) :, None]).squeeze(1)
        tolerance = 8 * torch.finfo(torch.bfloat16).eps * logits.abs().amax(1)
        assert (chosen >= logits.amax(1) - tolerance).all()


@pytest.mark.parametrize("graphs", [True, False])
def test_deterministic_answers_do_not_depend_on_the_batch(model, graphs):
    """Rule 1, G4: alone, among others, in chunks, with a warm prefix cache: the same tokens and log-probabilities."""
    asked = requests(12)
    config = {"deterministic": True, "cuda_graphs": graphs, "prefix_cache": True}
    with engine_of(model, **config) as engine:
        together = answers(engine.scheduler.run_batch(asked))
        warm = answers(engine.scheduler.run_batch(asked))
    with engine_of(model, max_batch_tokens=24, **config) as engine:
        in_chunks = answers(engine.scheduler.run_batch(asked[::-1]))[::-1]
    with engine_of(model, **config) as engine:
        alone = [answers(engine.scheduler.run_batch([request]))[0] for request in asked]
    assert together == warm == in_chunks == alone
    assert not torch.are_deterministic_algorithms_enabled()


def model_with_experts(dtype: str = "bfloat16") -> CausalLM:
    return gpu_model(dtype=dtype, **EXPERTS)


@pytest.fixture(scope="module")
def experts() -> CausalLM:
    served = model_with_experts()
    if not served.supports_graph:
        pytest.skip("the experts' shares stay on the device on compute capability 9 and 10 alone")
    return served


@pytest.mark.parametrize("n", [1, 5, 16])
def test_experts_in_graphs_and_eager_agree_bit_for_bit(experts, n):
    """Rule 9, G4: nothing is read back, so decode and mixed steps are captured; the routing is that of each replay."""
    with engine_of(experts, cuda_graphs=True) as captured, engine_of(experts, cuda_graphs=False) as eager:
        expected = answers(eager.scheduler.run_batch(requests(n)))
        for _ in range(3):
            assert answers(captured.scheduler.run_batch(requests(n))) == expected
        assert len(executor_of(captured).graphs) > len(executor_of(captured).buckets.first)
    assert len({tokens for tokens, _ in expected}) == n


@torch.no_grad()
def test_the_grouped_product_gives_what_the_loop_gives(experts):
    """Rule 9: whatever the shares, none for some experts and all for one among them; rows of their own bits."""
    linear = experts.model.layers[0].mlp.experts.gate_up_proj
    for counts in ([5, 0, 3, 1], [0, 0, 0, 300], [1, 0, 0, 0], [700, 1, 0, 40]):
        x = torch.randn(sum(counts), linear.weight.shape[2], device="cuda").to(torch.bfloat16)
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        torch.testing.assert_close(linear(x, ends), linear(x, counts), rtol=0.016, atol=0.02)


@pytest.mark.parametrize("graphs", [True, False])
def test_deterministic_answers_of_experts_do_not_depend_on_the_batch(experts, graphs):
    """Rule 1, G4, as for dense models: alone, among others, in chunks."""
    asked = requests(12)
    config = {"deterministic": True, "cuda_graphs": graphs}
    with engine_of(experts, **config) as engine:
        together = answers(engine.scheduler.run_batch(asked))
    with engine_of(experts, max_batch_tokens=24, **config) as engine:
        in_chunks = answers(engine.scheduler.run_batch(asked[::-1]))[::-1]
    with engine_of(experts, **config) as engine:
        alone = [answers(engine.scheduler.run_batch([request]))[0] for request in asked]
    assert together == in_chunks == alone


def test_a_steady_step_of_experts_waits_for_nothing(experts):
    """W1, C5, by torch's detector of synchronising calls, without graphs too."""
    for config in ({}, {"cuda_graphs": False}):
        with steady_engine(experts, 7, config) as engine:
            before = engine.scheduler.n_steps
            with steady(may_allocate=True):
                for _ in range(20):
                    engine.scheduler.step()
            assert engine.scheduler.n_steps == before + 20, "each of them was launched"


def test_experts_whose_shares_are_read_back_run_without_graphs():
    """Strict: in fp16 there is no product that finds the shares on the device; asked for graphs, the engine refuses."""
    served = model_with_experts("float16")
    with pytest.raises(ConfigError, match="experts in float16 cannot be captured on this card; leave it out, or serve"):
        engine_of(served, cuda_graphs=True)
    with engine_of(served) as engine:
        assert len(executor_of(engine).graphs) == 0
        completions = engine.scheduler.run_batch(requests(5))
    assert [len(completion.token_ids) for completion in completions] == [20 + i for i in range(5)]


def test_fp8_keys_and_values(model):
    """Graphs and eager agree bit by bit on float8_e4m3fn too; first tokens have about the log-probabilities of bf16."""
    asked = requests(9)
    with engine_of(model) as engine:
        wide = answers(engine.scheduler.run_batch(asked))
    with (
        engine_of(model, kv_dtype="float8_e4m3fn") as captured,
        engine_of(model, kv_dtype="float8_e4m3fn", cuda_graphs=False) as eager,
    ):
        expected = answers(eager.scheduler.run_batch(asked))
        for _ in range(3):
            assert answers(captured.scheduler.run_batch(asked)) == expected
    firsts = torch.tensor([[a[1][0], b[1][0]] for a, b in zip(wide, expected, strict=True)])
    assert (firsts[:, 0] - firsts[:, 1]).abs().mean() < 0.3
