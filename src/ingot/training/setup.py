"""The parts of a run, each built by a function of its own. What can be wrong with the input is found before ranks meet,
before memory is taken, and before the run folder is touched."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.checkpoint.manifest import Manifest
from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.loading.token_dataset import Dataset
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.evaluation.generated import prompt_questions
from ingot.evaluation.in_run import EvalInputs, open_tasks
from ingot.evaluation.tasks.prompts import Question
from ingot.parallel.executors import device as devices
from ingot.parallel.executors.base import Executor
from ingot.parallel.executors.build import build_distributed, build_single, check_distributed
from ingot.parallel.executors.cuda_graph import check_cuda_graphs
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, choose_layout
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import join_world
from ingot.training.listener import RunListener
from ingot.training.runtime.memory_check import check_host_memory
from ingot.training.runtime.run_files import METRICS
from ingot.training.runtime.run_folder import ResumeState
from ingot.training.runtime.stop import start_compilers
from ingot.version import code_hash

MUCH_PADDING = 0.1  # of the positions of an epoch, from which on a warning is due


@dataclass(frozen=True)
class ExecutionPlan:
    """Where and how a run executes."""

    rank_env: RankEnv
    device: torch.device
    layout: Layout
    is_distributed: bool
    compiled: bool


@dataclass(frozen=True)
class Inputs:
    """What a run reads."""

    train: Dataset
    evaluated: EvalInputs
    tokenizer: Tokenizer | None
    clock: BatchClock
    prompts: list[Question]
    """To continue at checkpoints."""


def plan_execution(config: RunConfig, env: RankEnv, listener: RunListener) -> ExecutionPlan:
    """Choose device and layout, and refuse what cannot work there."""
    device, why_device = devices.choose_device(config, env.local_rank)
    layout, why_layout = choose_layout(
        config.parallel, env.world, config.model, config.global_train_batch_size, StepShape.of(config),
        devices.device_memory(device), env.local_world,
    )  # fmt: skip
    if device.type == "cpu":
        check_host_memory(config, layout, env.local_world)
    is_distributed = env.world > 1 or config.parallel.shard == 1
    if is_distributed:
        check_distributed(config, layout)
    devices.check_precision(config, device)
    check_cuda_graphs(config, device, layout)
    compiled, why_compiled = devices.choose_compile(config, device, layout)
    listener.note(f"device: {device.type} ({why_device})")
    listener.note(f"precision: {config.precision} (weights and optimizer in fp32)")
    if is_distributed:
        several = f"{env.world} processes, {layout} ({why_layout})"
        listener.note(f"layout: {several if env.world > 1 else 'one process, wrapped by FSDP2'}")
    deterministic = devices.make_deterministic(config, device, compiled)
    listener.note(f"torch.compile: {why_compiled}")
    listener.note(f"deterministic kernels: {'on' if deterministic else 'off'}")
    if isinstance(config.activation_checkpointing, float):
        devices.set_memory_budget(config.activation_checkpointing, compiled)
    return ExecutionPlan(env, device, layout, is_distributed, compiled)


def open_inputs(config: RunConfig, listener: RunListener) -> Inputs:
    """Open the datasets and the tokenizer, checked against the model."""
    shape = (config.max_seq_len, config.model.vocab_size, config.no_loss_after_token)
    train = open_dataset(config.sources.train, *shape)
    listener.note(f"data: {train.describe()}")
    if train.padding_share >= MUCH_PADDING:
        fitting = "a smaller max_seq_len" if config.sources.train.mix else f"max_seq_len={_unpadded_length(train)}"
        listener.warn(
            f"{train.padding_share:.1%} of each epoch is padding: the training data has {train.tokens:,} tokens, and a "
            f"sequence {config.max_seq_len:,}; set {fitting}, or train on more text"
        )
    tokenizer = _open_tokenizer(config, train)
    evaluated = open_tasks(config, tokenizer, listener, has_trained=_has_trained(config))
    evaluated.validation = {label: open_dataset(s, *shape) for label, s in config.sources.eval_sources.items()}
    if not evaluated.validation:
        listener.note("no validation data, so no validation loss; name some with data.eval.path=...")
    clock = BatchClock(config.global_train_batch_size, config.max_seq_len, train.samples, config.max_duration)
    return Inputs(train, evaluated, tokenizer, clock, prompt_questions(config, tokenizer))


def _has_trained(config: RunConfig) -> bool:
    """Whether the run folder shows that an earlier start passed the first step."""
    metrics = Path(config.run_folder) / METRICS
    return metrics.is_file() and metrics.stat().st_size > 0


def _unpadded_length(data: Dataset) -> int:
    """The longest sequence of which as many as now hold the data with next to no padding."""
    return -(-(data.tokens - 1) // data.samples)


def _open_tokenizer(config: RunConfig, data: Dataset) -> Tokenizer | None:
    """The tokenizer of the run. Training does not need one; text in and out does."""
    path = config.tokenizer or data.tokenizer_folder
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}; "
            f"set model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def build_executor(config: RunConfig, plan: ExecutionPlan, inputs: Inputs, listener: RunListener) -> Executor:
    """Meet the other ranks, if there are any, and build the model."""
    if plan.compiled and plan.device.type == "cuda":  # on a CPU, threads compile
        start_compilers()
    listener.note(f"model: {config.model.family}, {config.model.parameters:,} parameters")
    if not plan.is_distributed:
        return build_single(config, plan.device, plan.compiled, listener)
    world = join_world(plan.rank_env, plan.device, config.parallel.join_timeout)
    world.agree("start", {
        "config": hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest(),
        "layout": str(plan.layout), "code": code_hash(), "data": json.dumps(inputs.train.fingerprint()),
        "torch": torch.__version__, "compute capability": devices.describe_capability(plan.device),
    })  # fmt: skip
    return build_distributed(config, plan.layout, world, plan.device, plan.compiled, listener)


def check_continues(manifest: Manifest, state: ResumeState, config: RunConfig, inputs: Inputs) -> None:
    """Refuse to continue from a checkpoint where that is impossible or not what was asked for."""
    folder, total = manifest.folder, inputs.clock.total_batches
    if manifest.step > total:
        raise CheckpointError(
            f"{folder} is past max_duration={config.max_duration} ({total} batches); ask for more, or start over with "
            "--fresh"
        )
    if not manifest.has_training_state and manifest.step < total:
        raise CheckpointError(
            f"{folder} was saved with save_weights_only and cannot be continued; start from its weights in another "
            f"folder with load_path={folder}, or start over with --fresh"
        )
    tokenizer = inputs.tokenizer.fingerprint() if inputs.tokenizer is not None else None
    if None not in (tokenizer, state.tokenizer) and tokenizer != state.tokenizer:
        raise CheckpointError(f"{folder} was trained with another tokenizer; put it back, or use --fresh")
