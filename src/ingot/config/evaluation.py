"""Downstream tasks and how their scores are combined: the keys and defaults of LLM Foundry's YAML files."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, field_validator, model_validator

from ingot.config.base import Section, flat_choices, rule_error
from ingot.config.durations import Duration

FOLDER = "evaluations"
"""In a run folder: the scores of `ingot eval`, and the tasks that failed in the run."""
GENERATED = "generated.jsonl"
"""In a run folder: what the run made of `generate.prompts`."""
TaskType = Literal["language_modeling", "multiple_choice", "schema", "generation_task_with_answers"]

# field names of a record: context (or its options), answer, choices
_KEYS = {
    "language_modeling": ("context", "continuation", None),
    "multiple_choice": ("query", None, "choices"),
    "schema": (None, "continuation", "context_options"),
    "generation_task_with_answers": ("context", "answer", None),
}


class EvalOptions(Section):
    """The options of `ingot eval` for downstream tasks."""

    tasks: tuple[str, ...] = Field(default=(), json_schema_extra={"flags": ["--tasks"], "several": True})
    """Task files (.jsonl, or a YAML list), texts, or names from --list; several after one --tasks."""
    gauntlet: str | None = None
    """YAML file with an eval_gauntlet: composite scores of the tasks."""
    harness: tuple[str, ...] = Field(default=(), json_schema_extra={"flags": ["--harness"], "several": True})
    """Tasks of lm-evaluation-harness instead: names, patterns, YAML files or folders; several after one --harness."""
    include_path: Path | None = None
    """Folder of more task files for --harness to find by name."""
    core: Path | None = None
    """CORE instead: folder with core.yaml, eval_meta_data.csv and eval_data, as nanochat's bundle has them."""
    core_prompts: Literal["nanochat", "dclm"] = "nanochat"
    """Prompts of CORE: nanochat's, or LLM Foundry's, which DCLM uses."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples per question, for all tasks."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first questions of each task."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run tasks."""
    out: Path | None = Field(default=None, json_schema_extra={"flags": ["-o", "--out"]})
    """File for the scores of tasks. Default: RUN/evaluations/STEP.json."""
    nproc: int = Field(default=1, ge=1)
    """Processes that share the questions, each with the whole model; on GPUs, one per card."""
    plot: Path | None = None
    """PNG file for a plot of the scores over the steps of several checkpoints."""
    questions: bool = False
    """Write prompt, prediction and score of every question to that file."""


class TaskConfig(Section):
    """One downstream task."""

    label: str
    """First part of the metric's name; it may not contain a slash."""
    dataset_uri: str
    """JSON Lines file, folder of such files, or URL of one."""
    icl_task_type: TaskType
    """What a record holds, and how it is scored. question_answering is an old name of generation_task_with_answers."""
    num_fewshot: tuple[int, ...] = Field(min_length=1)
    """How many examples precede a question; the task is evaluated once for each number."""
    metric_names: tuple[str, ...] = ()
    """Report only the InContextLearning metrics that match one of these regular expressions. Default: all of the task
    type."""
    batch_size: int | None = Field(default=None, gt=0)
    """Rows of a batch as icl_subset_num_batches counts them. Scores do not depend on it: rows are packed by tokens."""
    max_seq_len: int | None = Field(default=None, gt=0)
    """Longest row in tokens; longer prompts lose their beginning. Default: that of the model."""
    padding_size: int | None = Field(default=None, gt=0)
    """Overrides max_seq_len, except in tasks that generate."""
    prompt_string: str = ""
    """Text at the very start."""
    example_delimiter: str = "\n"
    """Text between examples."""
    continuation_delimiter: str = " "
    """Text between context and answer."""
    prelimiter: str = Field(default="", validation_alias=AliasChoices("prelimiter", "question_prelimiter"))
    """Text before each context."""
    fewshot_random_seed: int = 1234
    """Seed of the examples."""
    strip_dataset: bool = True
    """Remove white space at both ends of all text fields, and at the end of the question's context."""
    has_categories: bool = False
    """Score each value of the field `category` on its own, with examples of the same category."""
    context_key: str | None = None
    """Field that holds the context. Default: by task type."""
    answer_key: str | None = None
    """Field that holds the answer or continuation. Default: by task type."""
    choices_key: str | None = None
    """Field that holds the choices. Default: by task type."""
    cot_delimiter: str = ""
    """Text between a chain of thought and the answer; what follows it in the output is scored."""
    early_stopping_criteria: tuple[str, ...] = ()
    """Strings that end the generated text."""
    do_normalization: bool = True
    """Compare answers without case, punctuation, articles and repeated white space."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Only max_new_tokens, and what greedy decoding already is: do_sample=false, num_beams=1."""

    @property
    def keys(self) -> tuple[str | None, str | None, str | None]:
        """The names of the fields of a record: context, answer, choices."""
        given = (self.context_key, self.answer_key, self.choices_key)
        context, answer, choices = (own or usual for own, usual in zip(given, _KEYS[self.icl_task_type], strict=True))
        if self.icl_task_type == "schema":
            return None, answer, self.choices_key or self.context_key or choices
        return context, answer, choices

    @field_validator("icl_task_type", mode="before")
    @classmethod
    def _old_name(cls, value: Any) -> Any:
        return "generation_task_with_answers" if value == "question_answering" else value

    @field_validator("num_fewshot", "early_stopping_criteria", "metric_names", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, int | str) else value

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        if not self.label or "/" in self.label:
            raise rule_error("label", "must be a name without slashes: names of metrics are split at them")
        if min(self.num_fewshot) < 0:
            raise rule_error("num_fewshot", "counts examples: use 0 or more")
        usual = {"do_sample": False, "num_beams": 1, "use_cache": True, "temperature": None, "top_p": None}
        for name, value in self.generation_kwargs.items():
            if name != "max_new_tokens" and value != usual.get(name, object()):
                raise rule_error("generation_kwargs", f"{name}={value!r}: answers are generated greedily here")
        return self


class BenchmarkConfig(Section):
    """A task in a category of the gauntlet."""

    name: str
    """Label of the task."""
    num_fewshot: int
    """Which of its numbers of examples."""
    random_baseline: float = 0.0
    """Accuracy of a random guess."""


class CategoryConfig(Section):
    """Benchmarks that are averaged."""

    name: str
    """Name of the composite score."""
    benchmarks: tuple[BenchmarkConfig, ...]
    """What it is made of."""


class GauntletConfig(Section):
    """Composite scores of downstream tasks."""

    categories: tuple[CategoryConfig, ...]
    """The composites."""
    weighting: Literal["EQUAL", "SAMPLE_SZ", "LOG_SAMPLE_SZ"] = "EQUAL"
    """How benchmarks are weighted within a category: equally, by their questions, or by the log2 of them."""
    subtract_random_baseline: bool = True
    """Subtract the random baseline from each accuracy."""
    rescale_accuracy: bool = True
    """Then divide by the range that is left, so that a perfect score is 1."""
    averages: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Means of categories by name. Default: default_average of all."""

    @model_validator(mode="after")
    def _check(self) -> "GauntletConfig":
        names = [category.name for category in self.categories]
        if self.rescale_accuracy and not self.subtract_random_baseline:
            raise rule_error("rescale_accuracy", "needs subtract_random_baseline=true")
        for average, members in self.averages.items():
            if average in names:
                raise rule_error("averages", f"{average} is already the name of a category; choose another")
            if unknown := [name for name in members if name not in names]:
                raise rule_error("averages", f"{average} names {unknown[0]}, but the categories are {', '.join(names)}")
        return self


def _text_or_section(value: Any) -> str:
    return "of-text" if isinstance(value, str) else "of-section"


class EvalConfig(Section):
    """Downstream tasks inside a run."""

    tasks: tuple[
        Annotated[
            Annotated[str, Tag("of-text")] | Annotated[TaskConfig, Tag("of-section")], Discriminator(_text_or_section)
        ],
        ...,
    ] = ()
    """YAML files with icl_tasks, .jsonl files, names from `ingot eval --list`, or tasks written out here."""
    gauntlet: (
        Annotated[
            Annotated[str, Tag("of-text")] | Annotated[GauntletConfig, Tag("of-section")],
            Discriminator(_text_or_section),
        ]
        | None
    ) = Field(default=None, json_schema_extra=flat_choices)
    """YAML file with an eval_gauntlet, or one written out here: composite scores of the tasks."""
    intervals: dict[str, Duration] = Field(default_factory=dict)
    """How often to run single evaluators, by the label of a task or validation set; the others follow eval_interval."""
    folder: str | None = None
    """Where relative paths of tasks are looked for before the working directory. Default: the folder of the recipe."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | dict) else () if value is None else value

    @model_validator(mode="after")
    def _check(self) -> "EvalConfig":
        if self.gauntlet is not None and not self.tasks:
            raise rule_error("gauntlet", "combines tasks, and there are none; name them with eval.tasks")
        for label, interval in self.intervals.items():
            if interval.is_wall_clock:
                raise rule_error("intervals", f"{label}: {interval} is wall-clock time; use ba, ep, sp or tok here")
        return self
