"""Our checkpoints as a model of lm-evaluation-harness (EleutherAI; the `bench` extra): import this module only with it.

The harness owns the tasks, prompts and metrics; llm/evaluation_tasks.py answers its questions. `MewLM` is registered
as "mew", so that `lm_eval.simple_evaluate(model="mew", model_args="run=runs/x")` works once this module is imported;
`python -m llm.evaluating_tasks` does that.
"""

from dataclasses import fields, replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from configs.errors import UserError
from llm.engine_request import RequestParams
from llm.evaluation_load import load_for_evaluation
from llm.evaluation_tasks import TaskConfig, TaskModel
from llm.model_loading import choose_dtype
from llm.sampling import SamplingConfig
from parallel.mesh import choose_device

DEFAULT_NEW_TOKENS = 256  # what lm_eval's own models take where a task does not say
SAMPLING_NAMES = {field.name for field in fields(SamplingConfig)}
# do_sample is handled below; the rest says how lm_eval or transformers work, not what is written.
KNOWN_SETTINGS = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "num_beams", "use_cache", *SAMPLING_NAMES}


@register_model("mew")
class MewLM(LM):
    """A checkpoint of ours; `run` or `checkpoint` as in llm/evaluating.py."""

    def __init__(
        self,
        run: str | None = None,
        checkpoint: str | None = None,
        batch_size: int | str = 16,
        device: str = "auto",
        dtype: str = "auto",
        document_start: bool = False,
        **unused: Any,
    ):
        super().__init__()
        unknown = {name for name in unused if name != "max_batch_size"}
        if unknown:
            raise UserError(f"model_args {sorted(unknown)} are unknown; use run, checkpoint, dtype, document_start")
        chosen = choose_device(device, local_rank=0)
        loaded = load_for_evaluation(run, checkpoint, chosen, choose_dtype(dtype, chosen))
        config = TaskConfig(loaded.model.config.max_seq_len, int(batch_size), bool(document_start))
        self.loaded, self.model = loaded, TaskModel(loaded.model, loaded.tokenizer, config, loaded.device)

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.tokenizer.sha256

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.model.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self.model.text_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        params = [replace(make_params(request.args[1]), index=index) for index, request in enumerate(requests)]
        return self.model.write([request.args[0] for request in requests], params)


def make_params(settings: dict[str, Any]) -> RequestParams:
    """A request's settings as the engine takes them; UserError for one that would change the text and is not known."""
    settings = {name: value for name, value in settings.items() if value is not None}
    unknown = sorted(settings.keys() - KNOWN_SETTINGS)
    if unknown:
        raise UserError(f"generation_kwargs {unknown} are unknown; use {', '.join(sorted(KNOWN_SETTINGS))}")
    if settings.get("num_beams", 1) != 1:
        raise UserError(f"num_beams={settings['num_beams']}: beam search is not there; use 1")
    until = settings.get("until", [])
    stops = (until,) if isinstance(until, str) else tuple(until)
    sampling = {name: value for name, value in settings.items() if name in SAMPLING_NAMES}
    if not settings.get("do_sample", sampling.get("temperature", 0.0) > 0.0):
        sampling["temperature"] = 0.0
    new_tokens = settings.get("max_gen_toks", settings.get("max_new_tokens", DEFAULT_NEW_TOKENS))
    return RequestParams(SamplingConfig(**sampling), int(new_tokens), stop=tuple(stop for stop in stops if stop))
