"""Engines for the tests: in this process, one thread, one at a time; checkpoints are written once a session.

Run in the serve-cpu environment with the plugin installed there (the entry point must exist); the code tested is this
tree's.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[1]
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(PLUGIN))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest  # noqa: E402
import torch  # noqa: E402

import formats  # noqa: E402
import tiny  # noqa: E402

MEMORY_REPORT = "vllm_k3_cpu.memory_report.MemoryReport"


@pytest.fixture(scope="session", autouse=True)
def _entry_point_installed():
    from importlib.metadata import entry_points

    names = {e.value for e in entry_points(group="vllm.general_plugins")}
    if "vllm_k3_cpu:register" not in names:
        pytest.exit(f"install the plugin first: pip install --no-deps --no-build-isolation {PLUGIN}", 4)


class Engine:
    """An in-process vLLM engine that answers with raw logits."""

    def __init__(self, llm):
        self.llm = llm

    def logits(self, *prompts: list[int], new_tokens: int = 1) -> list[torch.Tensor]:
        """Per prompt [len(prompt) - 1 + new tokens, vocab]: logits after every prompt token but those served from the
        prefix cache are recomputed (asking for prompt logits turns its use off), then of every generated token."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, prompt_logprobs=-1, logprobs=-1, detokenize=False
        )
        outputs = self._generate(prompts, sampling)
        return [_table([*o.prompt_logprobs[1:], *o.outputs[0].logprobs]) for o in outputs]

    def continuation(self, *prompts: list[int], new_tokens: int = 4) -> list[tuple[list[int], torch.Tensor, int]]:
        """Per prompt: greedy tokens, their logits [new tokens, vocab], prompt tokens that came from the cache."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=-1, detokenize=False)
        return [
            (list(o.outputs[0].token_ids), _table(o.outputs[0].logprobs), o.num_cached_tokens)
            for o in self._generate(prompts, sampling)
        ]

    def _generate(self, prompts, sampling):
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)

    def memory(self) -> dict:
        return self.llm.collective_rpc("memory_report")[0]

    def kv_scales(self) -> dict:
        return self.llm.collective_rpc("kv_scales")[0]["layers"]

    @property
    def model(self) -> torch.nn.Module:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def _table(rows) -> torch.Tensor:
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


@contextmanager
def running(checkpoint: Path, **options):
    """An `Engine`; its process-wide state is taken down afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = dict(
        model=str(checkpoint), dtype="float32", max_model_len=4096, kv_cache_memory_bytes=48 << 20, max_num_seqs=8,
        max_num_batched_tokens=2048, logprobs_mode="raw_logits", max_logprobs=-1, worker_extension_cls=MEMORY_REPORT,
    )  # fmt: skip
    llm = None
    try:
        llm = LLM(**(settings | options))
        yield Engine(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def weights() -> dict[str, torch.Tensor]:
    return tiny.random_weights()


@pytest.fixture(scope="session")
def native(tmp_path_factory, weights):
    """(checkpoint in K3's own format, its weights dequantized)."""
    stored, values = formats.quantize(weights, "mxfp4", tiny.is_expert)
    config = formats.quantization_config([formats.group("mxfp4", ["Linear"])], tiny.NATIVE_IGNORE)
    return tiny.write(tmp_path_factory.mktemp("native"), stored, config), values


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.TEXT_CONFIG["vocab_size"], (length,), generator=generator).tolist()


def divergence(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Mean KL(want || got) of two logit tables and the share of equal top-1 tokens."""
    got, want = got.log_softmax(-1), want.log_softmax(-1)
    agreement = (got.argmax(-1) == want.argmax(-1)).float().mean().item()
    return (want.exp() * (want - got)).sum(-1).mean().item(), agreement
