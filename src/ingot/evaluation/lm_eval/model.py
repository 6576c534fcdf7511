"""Our models as a model of lm-evaluation-harness.

The harness hands over text and defines how it becomes tokens: `TemplateLM` encodes a context and its continuation
together, moves spaces from the end of the context to the continuation, and uses a prefix token for an empty context.
Those rules are kept. What is ours is below them: requests with the same context are scored together, the context is
computed once, and logits exist only where a token is scored (`evaluation/tasks/scoring.py`).

The harness asks one process for everything, so this model always says that it is rank 0 of 1.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from ingot.checkpoint.hf.transfer import tokenizer_of
from ingot.checkpoint.load import load_model
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError, DataError
from ingot.evaluation.tasks.decoding import Decoding, continue_prompts
from ingot.evaluation.tasks.prompts import PromptRow
from ingot.evaluation.tasks.scoring import Scorer
from ingot.model.gpt import GPT

Pair = tuple[tuple[str, str], list[int], list[int]]  # (context, continuation) and the token ids of both
_ENCODE = 4096  # texts that are tokenized at a time
# of a task's generation_kwargs; HFLM passes any others to transformers
_SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}
_GREEDY = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "repetition_penalty": 1.0}


class IngotLM(TemplateLM):
    """A run, a checkpoint or a Hugging Face folder."""

    def __init__(
        self, path: str | Path, device: str = "auto", batch_size: int | str = "auto", max_batch_size: int | None = None,
        precision: str | None = None, max_length: int | None = None, add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:  # fmt: skip
        """batch_size: so many sequences of max_length tokens at a time; auto, and 1 (the harness's default), leave the
        choice to us. Scores do not depend on it. max_length: tokens of a sequence. Default: the model's context."""
        super().__init__()
        if precision not in (None, "fp32", "bf16"):
            raise ConfigError(f"precision={precision}: models are evaluated in fp32 or bf16")
        self._device = _device(device)
        self.path = Path(path)
        self.tokenizer: Tokenizer = tokenizer_of(self.path)
        self.model: GPT = load_model(self.path, self._device)
        self.precision = precision or ("bf16" if self._device.type == "cuda" else "fp32")
        self.max_length = self._check_length(max_length)
        self.add_bos_token = add_bos_token
        self._prefix = self._find_prefix(prefix_token_id)
        self.scorer = Scorer(self.model, self._device, self.precision)
        if sequences := _sequences(batch_size, max_batch_size):
            self.scorer.batch_tokens = sequences * self.max_length
        self._encoded: dict[tuple[str, bool], list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.tokenizer.eos_id if self.tokenizer.eos_id is not None else self._prefix

    @property
    def prefix_token_id(self) -> int:
        """What precedes a text that has no context."""
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, by default with what the tokenizer adds by itself, but no second BOS before a text with one."""
        special = self._adds_special(string) if add_special_tokens is None else add_special_tokens
        known = self._encoded.get((string, special))
        return list(known) if known is not None else self.tokenizer.encode(string, special_tokens=special)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each request's continuation, and whether it is what greedy decoding would produce."""
        pairs = [request.args for request in requests]
        if empty := next((context for context, continuation in pairs if not continuation), None):
            raise DataError(f"a task asks for the likelihood of an empty continuation of {empty[-60:]!r}")
        self._encode_ahead(pairs)
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._encoded.clear()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that start with the last token of the window before."""
        windows: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                context, continuation = utils.make_disjoint_window(window)
                windows.append((("", ""), context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (log_likelihood, _) in zip(owners, scores, strict=True):
            totals[owner] += log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string. A context that is too long loses its
        beginning."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), desc="generating", disable=disable_tqdm) as bar:
            for numbers in groups.values():
                contexts = [requests[number].args[0] for number in numbers]
                texts = self._generate(contexts, requests[numbers[0]].args[1], bar.update)
                for number, text in zip(numbers, texts, strict=True):
                    answers[number] = text
        return answers

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Pretrained models have none."""
        raise ConfigError("models of ingot have no chat template; leave out --apply_chat_template")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes next to the results."""
        return {"model_num_parameters": self.model.config.parameters, "model_dtype": self.precision}

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(*request) for request in requests]
        total = sum(len(row.context) + len(row.continuation) for row in rows)
        with tqdm(total=total, desc="scoring", unit=" tokens", unit_scale=True, disable=disable_tqdm) as bar:

            def advance(tokens: int) -> None:
                bar.update(min(tokens, total - bar.n))

            scores = [score for question in self.scorer.score(_questions(rows), advance) for score in question]
            advance(total)  # tokens that were computed once for several rows
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def _row(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> PromptRow:
        """The last max_length + 1 tokens: the last one is scored, but not an input."""
        room = self.max_length + 1 - len(continuation)
        if not continuation:
            raise DataError(
                f"the continuation {texts[1]!r} adds no token to its context, which ends in {texts[0][-60:]!r}; start "
                "continuations with a space (target_delimiter of the task)"
            )
        if room < 1:
            raise DataError(f"a continuation has {len(continuation)} tokens, and this model reads {self.max_length}")
        context = context or [self.prefix_token_id]  # it was only white space, which is now part of the continuation
        return PromptRow(tuple(context[-room:]), tuple(continuation), texts[1], is_cut=len(context) > room)

    def _generate(self, contexts: Sequence[str], given: dict[str, Any], progress: Any) -> list[str]:
        settings = dict(normalize_gen_kwargs(given))
        new_tokens = int(settings.pop("max_gen_toks"))
        eos = self.tokenizer.decode([self.eot_token_id])
        stops = [stop for stop in handle_stop_sequences(settings.pop("until", None), eos=eos) if stop]
        for name, value in settings.items():
            if name not in _SAMPLING and _GREEDY.get(name, value is None) != value:
                raise ConfigError(
                    f"generation_kwargs: {name}={value!r} is not supported; models here sample or are greedy"
                )
        if new_tokens >= self.max_length:
            raise ConfigError(
                f"max_gen_toks={new_tokens} leaves no room for a prompt in the {self.max_length} tokens of this model"
            )
        draws = bool(settings.get("do_sample"))
        decoding = Decoding(
            new_tokens, self.tokenizer.eos_id, lambda ids: any(stop in self.tokenizer.decode(ids) for stop in stops),
            float(settings.get("temperature") or 1.0) if draws else 0.0, int(settings.get("top_k") or 0),
            float(settings.get("top_p") or 1.0),
        )  # fmt: skip
        room = self.max_length - new_tokens
        prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-room:] for context in contexts]
        written = continue_prompts(self.model, prompts, decoding, self.precision, self.scorer.batch_tokens, progress)
        texts = [self.tokenizer.backend.decode(ids, skip_special_tokens=True) for ids in written]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _adds_special(self, text: str) -> bool:
        if self.add_bos_token is not None:
            return self.add_bos_token
        return not text.startswith(self.tokenizer.decode([self.prefix_token_id]))

    def _encode_ahead(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Tokenize what `TemplateLM` will ask for, each text once and on all cores."""
        texts: dict[tuple[str, bool], None] = {}
        for context, continuation in pairs:
            if not context:
                texts[continuation, False] = None
                continue
            whole, start = context + continuation, context.rstrip()
            texts[whole, self._adds_special(whole)] = None
            texts[start, self._adds_special(start)] = None
        for special in (False, True):
            wanted = [text for text, with_special in texts if with_special == special]
            for at in range(0, len(wanted), _ENCODE):
                part = wanted[at : at + _ENCODE]
                for text, found in zip(
                    part, self.tokenizer.backend.encode_batch_fast(part, add_special_tokens=special), strict=True
                ):
                    self._encoded[text, special] = found.ids

    def _find_prefix(self, given: int | None) -> int:
        """BOS, or EOS where the tokenizer has no BOS."""
        bos = self.tokenizer.bos_id
        found = given if given is not None else bos if bos is not None else self.tokenizer.eos_id
        if found is None:
            raise ConfigError(
                f"{self.path}: the tokenizer has neither a BOS nor an EOS token to start a text with; name one with "
                "prefix_token_id=ID"
            )
        return int(found)

    def _check_length(self, given: int | None) -> int:
        context = self.model.config.context
        if given is not None and int(given) > context and self.model.config.positions == "learned":
            raise ConfigError(f"max_length={given}: the positions of this model end at {context}")
        return int(given or context)


def _device(name: str) -> torch.device:
    """The harness asks for cuda:0 unless told otherwise, whatever there is."""
    if name == "auto" or (name.startswith("cuda") and not torch.cuda.is_available()):
        name = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"ingot: the model runs on {name}", file=sys.stderr)
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name}: models are evaluated on cpu or cuda")
    return device


def _sequences(batch_size: int | str, max_batch_size: int | None) -> int | None:
    """How many sequences at a time a batch size of the harness means; None leaves it to us."""
    text = str(batch_size).partition(":")[0]
    if text == "auto":
        return max_batch_size
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"batch_size={batch_size}: use auto or a number of sequences")
    return int(text) if int(text) > 1 else None


def _questions(rows: Sequence[PromptRow]) -> list[list[PromptRow]]:
    """Neighbors with the same context are the choices of one question."""
    questions: list[list[PromptRow]] = []
    for row in rows:
        if questions and questions[-1][0].context == row.context:
            questions[-1].append(row)
        else:
            questions.append([row])
    return questions
