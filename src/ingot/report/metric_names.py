"""Every metric of a run, with its unit and meaning. A test compares the names with the code that writes them.

NAME, LABEL and N in a name stand for a data source, an optimizer or validation set, and a parameter group.
"""

METRICS: dict[str, str] = {
    # progress
    "time/batch": "Finished batches (optimizer steps).",
    "time/sample": "Sequences trained on so far.",
    "time/token": "Tokens trained on so far: samples times `max_seq_len`, padding included.",
    "time/token/NAME": "Of those, the tokens from source NAME of a mixture.",
    "time/epoch": "Passes over the training data so far, as a fraction.",
    "time/train": "Hours spent in the training loop, over all starts of the run.",
    "time/remaining_estimate": "Hours to the end: the median time of recent batches for those that remain, plus "
    "the evaluations and saves to come.",
    # learning
    "loss/train/total": "Cross entropy per token over the global batch, in nats.",
    "metrics/train/LanguageCrossEntropy": "The same under Composer's name.",
    "metrics/train/LanguagePerplexity": "exp(cross entropy).",
    "metrics/eval/LanguageCrossEntropy": "Cross entropy per token on the validation data, in nats.",
    "metrics/eval/LanguagePerplexity": "exp(cross entropy) on the validation data.",
    "metrics/eval/BitsPerByte": "Validation loss in bits per byte of text. Unlike perplexity it does not depend on the "
    "tokenizer, so it compares models with different vocabularies. Needs a dataset that ingot prepared.",
    "metrics/eval/LABEL/LanguageCrossEntropy": "The same three of each of several validation sets.",
    "metrics/TASK/N-shot/METRIC": "Score of a downstream task with N examples: see the guide on evaluation.",
    "metrics/TASK/N-shot/CATEGORY/METRIC": "The same of one category of a task with `has_categories`.",
    "icl/metrics/eval_gauntlet/NAME": "Composite score of the gauntlet: a category, or a mean of categories.",
    "l2_norm/grad/global": "Norm of the whole gradient before clipping.",
    "lr-LABEL/groupN": "Learning rate of parameter group N of the optimizer.",
    "trainer/loss_scale": "Loss scale (fp16 only).",
    "trainer/device_train_microbatch_size": "Sequences per forward pass on a device.",
    # speed
    "throughput/batches_per_sec": "Batches per second since the last row, without time spent on checkpoints.",
    "throughput/samples_per_sec": "Sequences per second, all devices together.",
    "throughput/tokens_per_sec": "Tokens per second, all devices together, without padding.",
    "throughput/device/tokens_per_sec": "The same per device.",
    "throughput/device/mfu": "Model FLOP utilization: floating-point operations of the model per second, as a "
    "fraction of the device's peak. Counts 6N + 12 L d S operations per token, as PaLM does. On a GPU "
    "only: a CPU has no reliable peak.",
    "throughput/device/mfu_causal": "The same with only the half of attention that a causal model needs.",
    # where the time goes
    "time/data": "Fraction of the time that this rank waited for data.",
    "time/checkpoint": "Fraction of the time that training waited for checkpoints.",
    "time/evaluation": "Fraction of the time that went into evaluations since the row before.",
    "time/profile": "Fraction of the time that went into writing a profile (only where it is not 0).",
    "time/communication": "Fraction of the time that this rank waited in collectives (several ranks only).",
    "time/compute": "The remaining fraction.",
    "time/data/max": "Largest `time/data` over all ranks.",
    "time/own_seconds/min": "Seconds per batch of the fastest rank for its own work, without waiting for others.",
    "time/own_seconds/max": "The same of the slowest rank.",
    "time/own_seconds/slowest_rank": "Which rank that is.",
    # memory
    "memory/current_allocated_mem": "GPU memory in use, in GB.",
    "memory/peak_allocated_mem": "Largest GPU memory in use so far, in GB.",
    "memory/peak_reserved_mem": "Largest GPU memory that PyTorch has reserved so far, in GB.",
    "memory/peak_reserved_mem/min": "The smallest of these over all ranks.",
    "memory/peak_reserved_mem/max": "The largest of these over all ranks.",
    "memory/alloc_retries": "How often PyTorch freed its cache to allocate; above 0, memory is fragmented or full.",
    "memory/peak_resident_mem": "Largest resident memory of the process so far, in GB (CPU only).",
    "memory/peak_resident_mem/min": "The smallest of these over all ranks.",
    "memory/peak_resident_mem/max": "The largest of these over all ranks.",
    # the machine of rank 0
    "system/cpu_cores": "CPU cores that the process of rank 0 keeps busy.",
    "system/resident_mem": "Resident memory of the process of rank 0, in GB.",
    "system/gpu_utilization": "Fraction of time that the GPU of rank 0 ran kernels (needs the package nvidia-ml-py).",
    "system/gpu_mem": "Memory in use on the GPU of rank 0, in GB, all processes together (needs nvidia-ml-py).",
    "system/gpu_power": "Power of the GPU of rank 0, in watts (needs nvidia-ml-py).",
    # checkpoints
    "checkpoint/step": "Batch of the newest complete checkpoint.",
    "checkpoint/stall_seconds": "Seconds that the last save stopped training.",
    "checkpoint/write_seconds": "Seconds that the last save took in the background.",
}
