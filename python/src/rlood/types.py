"""What the API takes and returns. Generated from openapi/openapi.json by scripts/python_types.py: do not edit.

These are plain dicts. The names are for editors and type checkers; nothing is checked when a program runs, and an answer
may have fields that are not named here.
"""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Optional, TypedDict, Union

Time = str


class FileEntry(TypedDict):
    """A file with its size and hash."""

    name: str
    sha256: str
    size_bytes: int

CheckpointId = str

JobId = str


class Checkpoint(TypedDict):
    """A checkpoint that a job has published."""

    best: bool
    created_at: Time
    files: List[FileEntry]
    id: CheckpointId
    job_id: JobId
    metrics: Dict[str, Optional[float]]
    pinned: bool
    step: int

DatasetId = str


class _DatasetRequired(TypedDict):
    columns: List[str]
    created_at: Time
    id: DatasetId
    num_rows: int
    owner: str
    sha256: str
    size_bytes: int
    state: str


class Dataset(_DatasetRequired, total=False):
    """A dataset of prompts."""

    bytes_done: Optional[int]
    bytes_per_second: Optional[float]
    bytes_total: Optional[int]
    eta_s: Optional[float]
    name: Optional[str]
    origin: Optional[Dict[str, Any]]
    problem: Optional[str]

Unique = Union[str, List[str]]


class DatasetMap(TypedDict, total=False):
    """Mapping of a row."""

    chat: Optional[bool]
    columns: Dict[str, str]
    completion: Optional[str]
    cut_answer: bool
    drop: Optional[List[str]]
    keep: Optional[List[str]]
    prompt: Optional[str]
    system: Optional[str]
    unique: Optional[Unique]
    where: Optional[str]


class Event(TypedDict):
    """An event of a job."""

    attempt: int
    data: Any
    seq: int
    time: Time
    type: str

ExportDtype = Literal["float32", "float16", "bfloat16", "q8_0"]


class ExportError(TypedDict):
    """Why an export failed."""

    code: str
    message: str

ExportFormat = Literal["merged", "gguf", "gguf_adapter"]

ExportId = str


class TaskProgress(TypedDict):
    """Progress of a verdict, an export or a push."""

    done: int
    total: int

TaskState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Survived(TypedDict):
    """How much of an adapter's update survives rounding to the export's data type."""

    cosine: float
    fraction: float


class _ExportRequired(TypedDict):
    checkpoint_id: CheckpointId
    created_at: Time
    files: List[FileEntry]
    format: ExportFormat
    id: ExportId
    job_id: JobId
    progress: TaskProgress
    state: TaskState
    step: int


class Export(_ExportRequired, total=False):
    """A checkpoint converted to another format."""

    advice: Optional[str]
    dtype: Optional[ExportDtype]
    error: Optional[ExportError]
    expires_at: Optional[Time]
    finished_at: Optional[Time]
    size_bytes: Optional[int]
    started_at: Optional[Time]
    survived: Optional[Survived]


class _ExportRequestRequired(TypedDict):
    format: ExportFormat


class ExportRequest(_ExportRequestRequired, total=False):
    """A request for an export."""

    context_length: Optional[int]
    dtype: Optional[ExportDtype]


class GenerationRequestPrompt2Item(TypedDict):
    content: str
    role: str


class GenerationRequestSampling(TypedDict, total=False):
    """Sampling settings that differ from the job's; temperature 0 = greedy."""

    chat_template_kwargs: Dict[str, Any]
    max_completion_length: int
    min_p: float
    repetition_penalty: float
    stop: List[str]
    temperature: float
    top_k: int
    top_p: float


class _GenerationRequestRequired(TypedDict):
    prompt: Union[str, List[GenerationRequestPrompt2Item]]


class GenerationRequest(_GenerationRequestRequired, total=False):
    checkpoint: Union[Literal["last", "best", "result"], int, str]
    num_generations: int
    sampling: GenerationRequestSampling
    seed: int

FinishReason = Literal["stop", "length"]


class GeneratedText(TypedDict):
    """A completion that a model generated."""

    completion: str
    finish_reason: FinishReason
    num_tokens: int


class RenderedPrompt(TypedDict):
    """A prompt as the model saw it."""

    num_tokens: int
    text: str


class SamplingPlan(TypedDict):
    """Sampling settings of the rollouts."""

    chat_template_kwargs: Dict[str, Any]
    max_completion_length: int
    min_p: float
    repetition_penalty: float
    stop: List[str]
    temperature: float
    top_k: int
    top_p: float

Weights = Literal["adapter", "model"]


class GenerationResult(TypedDict):
    """Completions of the base model and of a checkpoint for the same prompt, sampled with the same seed."""

    base: List[GeneratedText]
    checkpoint_id: CheckpointId
    job_id: JobId
    model: str
    prompt: RenderedPrompt
    sampling: SamplingPlan
    seconds: float
    seed: int
    step: int
    trained: List[GeneratedText]
    weights: Weights

Phase = Literal["loading", "rollout", "reward", "train", "eval", "checkpoint"]


class _AttemptEndRequired(TypedDict):
    attempt: int
    reason: str
    step: int
    time_ms: int


class AttemptEnd(_AttemptEndRequired, total=False):
    """How one attempt ended."""

    detail: Optional[str]
    memory_bytes: Optional[int]
    phase: Optional[Phase]


class _ObservationRequired(TypedDict):
    from_step: int
    metric: str
    statistic: str
    to_step: int
    value: float


class Observation(_ObservationRequired, total=False):
    """A measured value that supports an alert."""

    limit: Optional[float]

OnAlert = Literal["note", "pause", "stop"]

Rule = Literal[
    "high_variance",
    "kl_explosion",
    "reward_collapse",
    "length_explosion",
    "empty_output",
    "reward_hacking",
    "cold_start",
    "nothing_to_learn",
    "adapter_unchanged",
    "entropy_collapse",
    "slow_reward",
    "non_finite",
    "rollout_mismatch",
    "invalid_calls",
    "mostly_context",
    "episodes_at_limits",
    "no_tool_calls",
    "forgotten_episodes",
    "many_restarts",
]

Severity = Literal["info", "warning", "critical"]


class _JobAlertRequired(TypedDict):
    evidence: List[Observation]
    fix: str
    message: str
    on_alert: OnAlert
    rule: Rule
    severity: Severity
    since_step: int
    step: int
    time: Time


class JobAlert(_JobAlertRequired, total=False):
    """One episode of an alert of a job."""

    ends: List[AttemptEnd]
    cleared_step: Optional[int]

EndingCode = Literal["early_stopping", "alert", "diverged"]


class Marked(TypedDict):
    """A checkpoint and its step."""

    id: CheckpointId
    step: int


class _JobEndingRequired(TypedDict):
    code: EndingCode
    message: str
    step: int


class JobEnding(_JobEndingRequired, total=False):
    """Why a job ended before its last step."""

    best: Optional[float]
    best_step: Optional[int]
    good_before_step: Optional[int]
    metric: Optional[str]
    rule: Optional[Rule]
    checkpoint: Optional[Marked]

FailureClass = Literal["user", "reward", "infra"]

_FailureRequiredFields = TypedDict("_FailureRequiredFields", {"class": "FailureClass", "code": "str", "message": "str"}, total=True)


class _FailureRequired(_FailureRequiredFields):
    pass


class Failure(_FailureRequired, total=False):
    """Why a job failed, and how to fix it."""

    phase: Optional[Phase]
    step: Optional[int]
    suggestion: Optional[str]

SplitRule = Literal["row_number", "prompt_hash"]

SumOrder = Literal["v1", "v2"]

TieRule = Literal["std", "equal"]

WarmUpRule = Literal["evaluated", "evaluated_and_judged"]


class Arithmetic(TypedDict, total=False):
    """The rules that decide the exact bits of a run; absent = those of rlood 0.1."""

    split: SplitRule
    sums: SumOrder
    ties: TieRule
    warm_up: WarmUpRule


class CertificatePlan(TypedDict):
    """How the certificates of checkpoints are made."""

    prompts: List[str]


class _CheckpointPlanRequired(TypedDict):
    every_steps: int
    keep_best: int
    keep_last: int


class CheckpointPlan(_CheckpointPlanRequired, total=False):
    """When checkpoints are saved and which ones are kept."""

    every_seconds: Optional[int]
    greater_is_better: Optional[bool]
    metric_for_best: Optional[str]


class SourcePlan(TypedDict):
    """One of several sources of prompts."""

    name: str
    num_rows: int
    weight: float


class _DatasetPlanRequired(TypedDict):
    id: DatasetId
    num_rows: int
    sha256: str


class DatasetPlan(_DatasetPlanRequired, total=False):
    """A dataset and the sources of its rows."""

    sources: List[SourcePlan]


class _RulePlanRequired(TypedDict):
    enabled: bool


class RulePlan(_RulePlanRequired, total=False):
    """Settings of one alert rule."""

    on_alert: Optional[OnAlert]


class _DoctorPlanRequired(TypedDict):
    on_alert: OnAlert


class DoctorPlan(_DoctorPlanRequired, total=False):
    """Which alert rules are on, and what happens on an alert."""

    rules: Dict[str, RulePlan]


class EarlyStoppingPlan(TypedDict):
    """Early stopping: ends a run that no longer improves."""

    greater_is_better: bool
    metric: str
    min_delta: float
    patience: int

OnInvalid = Literal["mask", "zero", "fail"]

OnParseError = Literal["reply", "end"]

EpisodeReturn = Literal["sum", "last"]


class ToolPlan1(TypedDict):
    """Tools of an MCP server, over streamable HTTP."""

    allow: List[str]
    name: str
    url: str
    type: Literal["mcp"]


class ToolPlan2(TypedDict):
    """One tool behind one address, in the form of OpenAI's and Azure's agent fine-tuning."""

    description: str
    name: str
    parameters: Dict[str, Any]
    server_url: str
    type: Literal["http"]

ToolPlan = Union[ToolPlan1, ToolPlan2]

EnvironmentKind = Literal["http", "tools", "openenv"]

_EnvironmentPlanRequiredFields = TypedDict("_EnvironmentPlanRequiredFields", {"deadline_ms": "int", "max_batch_bytes": "int", "max_batch_samples": "int", "max_concurrency": "int", "max_invalid_tries": "int", "max_outage_s": "int", "max_tries": "int", "on_invalid": "OnInvalid", "timeout_ms": "int", "url": "str", "max_episode_tokens": "int", "max_observation_tokens": "int", "max_parse_errors": "int", "max_restarts": "int", "max_turns": "int", "name": "str", "on_parse_error": "OnParseError", "return": "EpisodeReturn", "tool_parser": "str", "type": "EnvironmentKind"}, total=True)


class _EnvironmentPlanRequired(_EnvironmentPlanRequiredFields):
    pass


class EnvironmentPlan(_EnvironmentPlanRequired, total=False):
    """The environment that a job's episodes are played with: a server, or the job's tools."""

    cache: bool
    max_invalid_fraction: float
    min_valid_per_group: int
    max_open_episodes: Optional[int]
    params: Dict[str, Any]
    tools: List[ToolPlan]

RewardPlan = Dict[str, Any]


class _GuardPlanRequired(TypedDict):
    dataset: DatasetPlan
    margin: float


class GuardPlan(_GuardPlanRequired, total=False):
    """A guard set: prompts on which the trained model must not be worse than the base model."""

    rewards: Optional[List[RewardPlan]]


class _EvalPlanRequired(TypedDict):
    before_start: bool
    dataset: DatasetPlan
    every_steps: int
    num_generations: int
    temperature: float


class EvalPlan(_EvalPlanRequired, total=False):
    """Evaluation, either on a separate dataset or on rows held out of the training dataset."""

    auto_verdict: bool
    fraction: Optional[float]
    guard: Optional[GuardPlan]
    held_out_rows: Optional[int]
    min_p: Optional[float]
    repetition_penalty: Optional[float]
    rewards: Optional[List[RewardPlan]]
    test_dataset: Optional[DatasetPlan]
    test_fraction: Optional[float]
    test_rows: Optional[int]
    top_k: Optional[int]
    top_p: Optional[float]


class _LoraPlanRequired(TypedDict):
    alpha: float
    dropout: float
    r: int
    target_modules: List[str]
    use_rslora: bool


class LoraPlan(_LoraPlanRequired, total=False):
    """The LoRA adapter that is trained."""

    alpha_pattern: Dict[str, float]
    rank_pattern: Dict[str, int]


class ModelPlan(TypedDict):
    """The base model of a job."""

    id: str
    sha256: str

OptimizerKind = Literal["adamw", "adamw_8bit"]

LrSchedulerType = Literal["constant", "linear", "cosine"]


class _OptimizerPlanRequired(TypedDict):
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    learning_rate: float
    lr_scheduler_type: LrSchedulerType
    max_grad_norm: float
    warmup_steps: int
    weight_decay: float


class OptimizerPlan(_OptimizerPlanRequired, total=False):
    """Settings of AdamW and of the learning-rate schedule."""

    kind: OptimizerKind


class ResourcesPlan(TypedDict):
    """The devices that a job needs."""

    devices: int

Combine = Literal["renormalize", "nansum"]

Estimator = Literal[
    "rloo",
    "grpo",
    "dr_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "reinforce",
    "rloo_turns",
]

KlEstimator = Literal["k1", "k2", "k3"]

KlIn = Literal["reward", "loss"]

Loss = Literal["sequence", "token_mean", "seq_mean_token_mean", "dr_grpo", "gspo"]

RewardNormalization = Literal["none", "batch", "running"]


class _RlooPlanRequired(TypedDict):
    beta: float
    combine: Combine
    epsilon: float
    epsilon_high: float
    mask_truncated_completions: bool
    normalize_advantages: bool
    num_generations: int
    num_iterations: int
    steps_per_generation: int


class RlooPlan(_RlooPlanRequired, total=False):
    """Settings of the algorithm (see `rloo.md`)."""

    drop_tied_groups: bool
    estimator: Estimator
    kl_estimator: KlEstimator
    kl_in: KlIn
    length_penalty: float
    loss: Loss
    max_refills: int
    min_informative_groups: int
    overlap: bool
    reward_clip_range: Optional[List[Any]]
    reward_normalization: RewardNormalization
    soft_overlong: Optional[int]

CorrectionMode = Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate", "none"]


class _CorrectionPlanRequired(TypedDict):
    max: float
    mode: CorrectionMode


class CorrectionPlan(_CorrectionPlanRequired, total=False):
    """The correction for servers whose log-probs differ from those of the trained model."""

    min: Optional[float]

RolloutEngine = Literal["vllm"]

PathMapFields = TypedDict("PathMapFields", {"from": "str", "to": "str"}, total=True)


class PathMap(PathMapFields):
    """The beginning of a path as the worker sees it, and as a rollout server sees it."""

    pass


class _RolloutServerPlanRequired(TypedDict):
    url: str


class RolloutServerPlan(_RolloutServerPlanRequired, total=False):
    """One rollout server."""

    path_map: Optional[PathMap]


class _RolloutPlanRequired(TypedDict):
    correction: CorrectionPlan
    engine: RolloutEngine
    max_concurrency: int
    servers: List[RolloutServerPlan]
    timeout_s: int


class RolloutPlan(_RolloutPlanRequired, total=False):
    """The engine that samples a job's completions in place of the worker's own, and how training corrects for the difference."""

    colocate: bool
    memory_share: float

ResumeGuarantee = Literal["exact", "exact_cpu", "recorded"]

StopGuarantee = Literal["token", "step"]


class Guarantees(TypedDict):
    """The guarantees for a job that is interrupted."""

    resume: ResumeGuarantee
    stop: StopGuarantee

RuntimeName = Literal["own", "trl"]


class _RuntimePlanRequired(TypedDict):
    name: RuntimeName


class RuntimePlan(_RuntimePlanRequired, total=False):
    """The program that trains the job, and the settings that only TRL has."""

    guarantees: Guarantees
    load_in_8bit: bool
    offload: bool
    versions: Dict[str, str]
    zero_stage: Optional[int]


class _TotalsRequired(TypedDict):
    completions: int
    completions_per_step: int
    dropped_rows_per_epoch: int
    epochs: float
    generation_blocks: int
    max_completion_tokens: int
    optimizer_steps: int
    prompts_per_block: int


class Totals(_TotalsRequired, total=False):
    """Amounts that follow from a job's settings, such as steps and completions."""

    greedy_completions: int
    max_refill_completions: int

QuantType = Literal["nf4", "fp4"]

ComputeDtype = Literal["f32", "bf16"]


class _TrainingPlanRequired(TypedDict):
    max_steps: int
    prompts_per_step: int
    seed: int
    shuffle_dataset: bool


class TrainingPlan(_TrainingPlanRequired, total=False):
    """Batch sizes, number of steps, seed and precision."""

    bnb_4bit_quant_type: QuantType
    dtype: ComputeDtype
    gradient_checkpointing: bool
    load_in_4bit: bool
    max_attempts: Optional[int]
    micro_batch_tokens: int
    use_bnb_nested_quant: bool

AdapterId = str


class AdapterPlan(TypedDict, total=False):
    """A PEFT adapter that was not trained on this server."""

    hub: Optional[str]
    revision: Optional[str]
    upload: Optional[AdapterId]

Reference = Literal["base", "initial"]


class _WarmStartPlanRequired(TypedDict):
    reference: Reference


class WarmStartPlan(_WarmStartPlanRequired, total=False):
    """The weights that a run starts from, and the reference of its KL penalty."""

    adapter: Optional[AdapterPlan]
    checkpoint: Optional[CheckpointId]

WarmUpReference = Literal["base", "warmed"]


class _WarmUpPlanRequired(TypedDict):
    batch_size: int
    dataset: DatasetPlan
    learning_rate: float
    reference: WarmUpReference
    steps: int


class WarmUpPlan(_WarmUpPlanRequired, total=False):
    """Supervised steps before the first RLOO step."""

    longest_row_tokens: Optional[int]


class _PlanRequired(TypedDict):
    checkpoints: CheckpointPlan
    dataset: DatasetPlan
    metadata: Dict[str, str]
    model: ModelPlan
    optimizer: OptimizerPlan
    rewards: List[RewardPlan]
    rloo: RlooPlan
    sampling: SamplingPlan
    totals: Totals
    training: TrainingPlan


class Plan(_PlanRequired, total=False):
    """The resolved settings of a job."""

    arithmetic: Arithmetic
    certificate: Optional[CertificatePlan]
    doctor: DoctorPlan
    early_stopping: Optional[EarlyStoppingPlan]
    environment: Optional[EnvironmentPlan]
    eval: Optional[EvalPlan]
    lora: Optional[LoraPlan]
    name: Optional[str]
    resources: ResourcesPlan
    reward_models: Dict[str, str]
    rollout: Optional[RolloutPlan]
    runtime: RuntimePlan
    warm_start: Optional[WarmStartPlan]
    warm_up: Optional[WarmUpPlan]

Requested = Literal["cancel", "pause"]


class JobRuntime(TypedDict):
    """The program that trains a job."""

    guarantees: Guarantees
    name: RuntimeName
    versions: Dict[str, str]

State = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]

TrainingPhase = Literal["exploration", "exploitation", "convergence"]


class _PhaseChangeRequired(TypedDict):
    evidence: List[Observation]
    phase: TrainingPhase
    step: int

PhaseChangeFields = TypedDict("PhaseChangeFields", {"from": "Optional[TrainingPhase]"}, total=False)


class PhaseChange(PhaseChangeFields, total=False):
    """A change of the training phase."""

    pass


class _JobRequired(TypedDict):
    alerts: List[JobAlert]
    attempt: int
    created_at: Time
    id: JobId
    last_seq: int
    metadata: Dict[str, str]
    owner: str
    plan: Plan
    runtime: JobRuntime
    server_errors: int
    state: State
    step: int
    total_steps: int


class Job(_JobRequired, total=False):
    """A training job and its progress."""

    device: Optional[str]
    ending: Optional[JobEnding]
    eta_s: Optional[float]
    failure: Optional[Failure]
    finished_at: Optional[Time]
    name: Optional[str]
    parent: Optional[JobId]
    phase: Optional[Phase]
    queue_position: Optional[int]
    requested: Optional[Requested]
    started_at: Optional[Time]
    status_reason: Optional[str]
    training_phase: Optional[PhaseChange]


class JobSpecCertificate(TypedDict):
    """The prompts of the checkpoints' certificates."""

    prompts: List[str]


class JobSpecCheckpoints(TypedDict, total=False):
    """When checkpoints are saved and which ones are kept."""

    every_seconds: Optional[int]
    every_steps: int
    greater_is_better: Optional[bool]
    keep_best: int
    keep_last: int
    metric_for_best: Optional[str]


class JobSpecDataset1(TypedDict, total=False):
    """The training prompts."""

    config: str
    hub: str
    id: str
    limit: int
    map: DatasetMap
    name: str
    records: List[Dict[str, Any]]
    revision: str
    seed: int
    sources: List[SourcePlan]
    split: str


class JobSpecDataset2Item(TypedDict, total=False):
    """One of several sources."""

    config: str
    hub: str
    id: str
    limit: int
    map: DatasetMap
    name: str
    records: List[Dict[str, Any]]
    revision: str
    seed: int
    split: str
    weight: float


class JobSpecDoctorRulesAdapterUnchanged1(TypedDict, total=False):
    enabled: bool
    on_alert: Literal["note", "pause", "stop"]


class JobSpecDoctorRules(TypedDict, total=False):
    """Rules with settings of their own, by rule name; false turns a rule off."""

    adapter_unchanged: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    cold_start: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    empty_output: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    entropy_collapse: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    episodes_at_limits: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    forgotten_episodes: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    high_variance: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    invalid_calls: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    kl_explosion: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    length_explosion: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    mostly_context: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    no_tool_calls: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    non_finite: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    nothing_to_learn: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    reward_collapse: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    reward_hacking: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    rollout_mismatch: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]
    slow_reward: Union[JobSpecDoctorRulesAdapterUnchanged1, bool]


class JobSpecDoctor(TypedDict, total=False):
    """Alert rules, and what happens on an alert."""

    on_alert: Literal["note", "pause", "stop"]
    rules: JobSpecDoctorRules


class JobSpecEarlyStopping(TypedDict, total=False):
    """Ends a run that no longer improves."""

    greater_is_better: bool
    metric: str
    min_delta: float
    patience: int

JobSpecEnvironmentFields = TypedDict("JobSpecEnvironmentFields", {"deadline_ms": "int", "headers": "Dict[str, str]", "max_concurrency": "int", "max_episode_tokens": "int", "max_invalid_tries": "int", "max_observation_tokens": "int", "max_open_episodes": "int", "max_outage_s": "int", "max_parse_errors": "int", "max_restarts": "int", "max_tries": "int", "max_turns": "int", "name": "str", "on_parse_error": "OnParseError", "params": "Dict[str, Any]", "previous_secret": "str", "return": "EpisodeReturn", "secret": "str", "timeout_ms": "int", "tool_parser": "str", "type": "Literal[\"http\", \"openenv\", \"tools\"]", "url": "str"}, total=False)


class JobSpecEnvironment(JobSpecEnvironmentFields, total=False):
    """A server that plays episodes of several turns with the model, or the limits of a job with `tools`."""

    pass


class _WebhookRewardSpecRequired(TypedDict):
    type: Literal["webhook"]
    url: str


class WebhookRewardSpec(_WebhookRewardSpecRequired, total=False):
    """A reward service that implements rlood's own request format (reward contract v1)."""

    applies_to: List[str]
    cache: bool
    completion_ids: bool
    deadline_ms: int
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    params: Dict[str, Any]
    previous_secret: str
    required: bool
    secret: str
    timeout_ms: int
    weight: float


class _OpenrlhfRewardSpecRequired(TypedDict):
    type: Literal["openrlhf"]
    url: str


class OpenrlhfRewardSpec(_OpenrlhfRewardSpecRequired, total=False):
    """Request format of OpenRLHF: `{query, prompts, labels}`."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    headers: Dict[str, str]
    label_column: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _SlimeRewardSpecRequired(TypedDict):
    type: Literal["slime"]
    url: str


class SlimeRewardSpec(_SlimeRewardSpecRequired, total=False):
    """Request format of slime: `{prompt, response, label}`, one sample per request."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    headers: Dict[str, str]
    label_column: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    required: bool
    reward_key: Optional[str]
    timeout_ms: int
    weight: float


class _LlamafactoryRewardSpecRequired(TypedDict):
    type: Literal["llamafactory"]
    url: str


class LlamafactoryRewardSpec(_LlamafactoryRewardSpecRequired, total=False):
    """A server that returns one score per text."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _TeiPredictRewardSpecRequired(TypedDict):
    type: Literal["tei_predict"]
    url: str


class TeiPredictRewardSpec(_TeiPredictRewardSpecRequired, total=False):
    """A server that returns one score per label."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    label: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _TeiRerankRewardSpecRequired(TypedDict):
    type: Literal["tei_rerank"]
    url: str


class TeiRerankRewardSpec(_TeiRerankRewardSpecRequired, total=False):
    """A server that scores how well a text answers a query."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    query: Optional[str]
    required: bool
    text: Optional[str]
    timeout_ms: int
    weight: float


class _VllmClassifyRewardSpecRequired(TypedDict):
    type: Literal["vllm_classify"]
    url: str


class VllmClassifyRewardSpec(_VllmClassifyRewardSpecRequired, total=False):
    """A server that returns one score per label."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    label: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _VllmScoreRewardSpecRequired(TypedDict):
    type: Literal["vllm_score"]
    url: str


class VllmScoreRewardSpec(_VllmScoreRewardSpecRequired, total=False):
    """A server that scores how well a text answers a query."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    query: Optional[str]
    required: bool
    text: Optional[str]
    timeout_ms: int
    weight: float


class _VllmPoolingRewardSpecRequired(TypedDict):
    type: Literal["vllm_pooling"]
    url: str


class VllmPoolingRewardSpec(_VllmPoolingRewardSpecRequired, total=False):
    """Request format of vLLM's `/pooling` endpoint."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    task: str
    template: Optional[str]
    timeout_ms: int
    weight: float


class _SglangClassifyRewardSpecRequired(TypedDict):
    type: Literal["sglang_classify"]
    url: str


class SglangClassifyRewardSpec(_SglangClassifyRewardSpecRequired, total=False):
    """A server that returns one score per label."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    label: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _HfTextClassificationRewardSpecRequired(TypedDict):
    type: Literal["hf_text_classification"]
    url: str


class HfTextClassificationRewardSpec(_HfTextClassificationRewardSpecRequired, total=False):
    """A server that returns one score per label."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    label: Optional[str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    model: Optional[str]
    name: str
    on_invalid: OnInvalid
    required: bool
    template: Optional[str]
    timeout_ms: int
    weight: float


class _OpenaiJudgeRewardSpecRequired(TypedDict):
    model: str
    rubric: str
    type: Literal["openai_judge"]
    url: str


class OpenaiJudgeRewardSpec(_OpenaiJudgeRewardSpecRequired, total=False):
    """A language model that scores by a rubric, one sample per request."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    extra_body: Dict[str, Any]
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_completion_tokens: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_score: float
    max_tries: int
    min_score: float
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    required: bool
    temperature: float
    timeout_ms: int
    votes: int
    weight: float


class _HttpTemplateRewardSpecRequired(TypedDict):
    body: Dict[str, Any]
    pointer: str
    type: Literal["http_template"]
    url: str


class HttpTemplateRewardSpec(_HttpTemplateRewardSpecRequired, total=False):
    """A reward from any JSON API over HTTP."""

    applies_to: List[str]
    batch: bool
    cache: bool
    deadline_ms: int
    headers: Dict[str, str]
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    required: bool
    timeout_ms: int
    weight: float

LengthUnit = Literal["words", "tokens"]


class _LengthRewardSpecRequired(TypedDict):
    type: Literal["length"]


class LengthRewardSpec(_LengthRewardSpecRequired, total=False):
    """Length reward: 1 within the limits, `below` and `above` outside, with a linear transition over `soft_margin`, plus a bonus for ending a sentence."""

    above: float
    applies_to: List[str]
    below: float
    max_abs_reward: float
    max_words: int
    min_words: int
    name: str
    required: bool
    sentence_bonus: float
    soft_margin: int
    unit: LengthUnit
    weight: float


class _ExactMatchRewardSpecRequired(TypedDict):
    column: str
    type: Literal["exact_match"]


class ExactMatchRewardSpec(_ExactMatchRewardSpecRequired, total=False):
    """Comparison of the completion with a column."""

    applies_to: List[str]
    blank_reference: Literal["not_applicable", "compare"]
    ignore_case: bool
    max_abs_reward: float
    name: str
    required: bool
    weight: float


class _ContainsRewardSpecRequired(TypedDict):
    type: Literal["contains"]


class ContainsRewardSpec(_ContainsRewardSpecRequired, total=False):
    """Search for a text in the completion."""

    applies_to: List[str]
    column: Optional[str]
    ignore_case: bool
    max_abs_reward: float
    name: str
    required: bool
    text: Optional[str]
    weight: float


class _NumberMatchRewardSpecRequired(TypedDict):
    column: str
    type: Literal["number_match"]


class NumberMatchRewardSpec(_NumberMatchRewardSpecRequired, total=False):
    """Comparison of the completion's last number with a column."""

    applies_to: List[str]
    blank_reference: Literal["not_applicable", "compare"]
    max_abs_reward: float
    name: str
    required: bool
    tolerance: float
    weight: float


class _RegexRewardSpecRequired(TypedDict):
    pattern: str
    type: Literal["regex"]


class RegexRewardSpec(_RegexRewardSpecRequired, total=False):
    """Search for a pattern in the completion (Rust regex syntax, linear time)."""

    applies_to: List[str]
    max_abs_reward: float
    name: str
    required: bool
    weight: float

StringOperation = Literal["eq", "ne", "like", "ilike"]


class _StringCheckRewardSpecRequired(TypedDict):
    operation: StringOperation
    reference: str
    type: Literal["string_check"]


class StringCheckRewardSpec(_StringCheckRewardSpecRequired, total=False):
    """Comparison of two texts, as in OpenAI's `string_check` grader."""

    applies_to: List[str]
    blank_reference: Literal["not_applicable", "compare"]
    input: str
    max_abs_reward: float
    name: str
    required: bool
    weight: float

SimilarityMetric = Literal[
    "fuzzy_match",
    "bleu",
    "gleu",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]


class _TextSimilarityRewardSpecRequired(TypedDict):
    evaluation_metric: SimilarityMetric
    reference: str
    type: Literal["text_similarity"]


class TextSimilarityRewardSpec(_TextSimilarityRewardSpecRequired, total=False):
    """Similarity of two texts, as in OpenAI's `text_similarity` grader."""

    applies_to: List[str]
    blank_reference: Literal["not_applicable", "compare"]
    input: str
    max_abs_reward: float
    name: str
    required: bool
    weight: float

AnswerPlace = Literal["auto", "boxed", "tag", "whole"]


class _MathEqualRewardSpecRequired(TypedDict):
    column: str
    type: Literal["math_equal"]


class MathEqualRewardSpec(_MathEqualRewardSpecRequired, total=False):
    """Comparison of final answers as mathematical expressions."""

    answer: AnswerPlace
    applies_to: List[str]
    blank_reference: Literal["not_applicable", "compare"]
    max_abs_reward: float
    name: str
    required: bool
    tolerance: float
    weight: float


class _JsonSchemaRewardSpecRequired(TypedDict):
    type: Literal["json_schema"]


class JsonSchemaRewardSpec(_JsonSchemaRewardSpecRequired, total=False):
    """JSON that conforms to a schema."""

    applies_to: List[str]
    column: Optional[str]
    fenced: bool
    max_abs_reward: float
    name: str
    required: bool
    schema: Optional[Dict[str, Any]]
    weight: float


class _RepetitionRewardSpecRequired(TypedDict):
    type: Literal["repetition"]


class RepetitionRewardSpec(_RepetitionRewardSpecRequired, total=False):
    """Penalty for repeated n-grams (Yeo et al."""

    applies_to: List[str]
    max_abs_reward: float
    max_penalty: float
    name: str
    ngram_size: int
    required: bool
    weight: float


class _SoftOverlongRewardSpecRequired(TypedDict):
    cache_tokens: int
    max_tokens: int
    type: Literal["soft_overlong"]


class SoftOverlongRewardSpec(_SoftOverlongRewardSpecRequired, total=False):
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13)."""

    applies_to: List[str]
    max_abs_reward: float
    name: str
    required: bool
    weight: float


class _FormatRewardSpecRequired(TypedDict):
    type: Literal["format"]


class FormatRewardSpec(_FormatRewardSpecRequired, total=False):
    """Tags that structure a completion."""

    applies_to: List[str]
    first_tag_open: bool
    max_abs_reward: float
    name: str
    partial: bool
    required: bool
    strict: bool
    tags: List[str]
    weight: float


class _MultiRewardSpecRequired(TypedDict):
    calculate_output: str
    graders: Dict[str, Any]
    type: Literal["multi"]


class MultiRewardSpec(_MultiRewardSpecRequired, total=False):
    """A formula over built-in rewards, as in OpenAI's `multi` grader."""

    applies_to: List[str]
    max_abs_reward: float
    name: str
    required: bool
    weight: float

RewardTextFormat = Literal["auto", "chat", "text", "pair"]


class _RewardModelRewardSpecRequired(TypedDict):
    model: str
    type: Literal["reward_model"]


class RewardModelRewardSpec(_RewardModelRewardSpecRequired, total=False):
    """A registered sequence-classification model that the worker runs."""

    applies_to: List[str]
    dtype: ComputeDtype
    format: RewardTextFormat
    label: Optional[str]
    max_abs_reward: float
    max_length: Optional[int]
    name: str
    required: bool
    weight: float


class _PythonRewardSpecRequired(TypedDict):
    file: str
    function: str
    type: Literal["python"]


class PythonRewardSpec(_PythonRewardSpecRequired, total=False):
    """A Python function that the worker runs in a separate process."""

    applies_to: List[str]
    cache: bool
    deadline_ms: int
    max_abs_reward: float
    max_batch_bytes: int
    max_batch_samples: int
    max_concurrency: int
    max_invalid_fraction: float
    max_invalid_tries: int
    max_outage_s: int
    max_tries: int
    min_valid_per_group: int
    name: str
    on_invalid: OnInvalid
    processes: int
    required: bool
    timeout_ms: int
    weight: float

RewardSpec = Union[
    WebhookRewardSpec,
    OpenrlhfRewardSpec,
    SlimeRewardSpec,
    LlamafactoryRewardSpec,
    TeiPredictRewardSpec,
    TeiRerankRewardSpec,
    VllmClassifyRewardSpec,
    VllmScoreRewardSpec,
    VllmPoolingRewardSpec,
    SglangClassifyRewardSpec,
    HfTextClassificationRewardSpec,
    OpenaiJudgeRewardSpec,
    HttpTemplateRewardSpec,
    LengthRewardSpec,
    ExactMatchRewardSpec,
    ContainsRewardSpec,
    NumberMatchRewardSpec,
    RegexRewardSpec,
    StringCheckRewardSpec,
    TextSimilarityRewardSpec,
    MathEqualRewardSpec,
    JsonSchemaRewardSpec,
    RepetitionRewardSpec,
    SoftOverlongRewardSpec,
    FormatRewardSpec,
    MultiRewardSpec,
    RewardModelRewardSpec,
    PythonRewardSpec,
]


class _JobSpecEvalGuardRequired(TypedDict):
    dataset: Union[JobSpecDataset1, List[JobSpecDataset2Item]]


class JobSpecEvalGuard(_JobSpecEvalGuardRequired, total=False):
    """A guard set: prompts on which training must not make the model worse."""

    margin: float
    rewards: List[RewardSpec]


class JobSpecEval(TypedDict, total=False):
    """Evaluation on a separate dataset or on held-out rows, with the job's rewards or with separate ones."""

    auto_verdict: bool
    before_start: bool
    dataset: Union[JobSpecDataset1, List[JobSpecDataset2Item]]
    every_steps: int
    fraction: float
    guard: JobSpecEvalGuard
    min_p: float
    num_generations: int
    repetition_penalty: float
    rewards: List[RewardSpec]
    temperature: float
    test_dataset: Union[JobSpecDataset1, List[JobSpecDataset2Item]]
    test_fraction: float
    top_k: int
    top_p: float


class JobSpecLora(TypedDict, total=False):
    """The LoRA adapter."""

    alpha: float
    dropout: float
    r: int
    target_modules: Union[
        Literal["all-linear"],
        List[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj", "input_linear", "output_linear", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]],
    ]
    use_rslora: bool


class JobSpecOptimizer(TypedDict, total=False):
    """The optimizer and its schedule."""

    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    kind: Literal["adamw", "adamw_8bit"]
    learning_rate: float
    lr_scheduler_type: LrSchedulerType
    max_grad_norm: float
    warmup_steps: int
    weight_decay: float


class JobSpecResources(TypedDict, total=False):
    """The devices that the job needs."""

    devices: int


class JobSpecRloo(TypedDict, total=False):
    """The algorithm."""

    beta: float
    combine: Combine
    drop_tied_groups: bool
    epsilon: float
    epsilon_high: float
    estimator: Estimator
    kl_coef: float
    kl_coeff: float
    kl_estimator: KlEstimator
    kl_in: KlIn
    length_penalty: float
    loss: Loss
    mask_truncated_completions: bool
    max_refills: int
    min_informative_groups: int
    normalize_advantages: bool
    num_generations: int
    num_iterations: int
    overlap: bool
    reward_clip_range: Optional[List[Any]]
    reward_normalization: RewardNormalization
    soft_overlong: Optional[int]
    steps_per_generation: int

JobSpecRolloutServersItemPathMapFields = TypedDict("JobSpecRolloutServersItemPathMapFields", {"from": "str", "to": "str"}, total=True)


class JobSpecRolloutServersItemPathMap(JobSpecRolloutServersItemPathMapFields):
    """Where the server sees the worker's folder of adapters; absent = at the same path."""

    pass


class _JobSpecRolloutServersItemRequired(TypedDict):
    url: str


class JobSpecRolloutServersItem(_JobSpecRolloutServersItemRequired, total=False):
    api_key: str
    path_map: JobSpecRolloutServersItemPathMap


class _JobSpecRolloutRequired(TypedDict):
    engine: Literal["own", "vllm"]


class JobSpecRollout(_JobSpecRolloutRequired, total=False):
    """Servers that sample the completions."""

    colocate: bool
    correction: CorrectionPlan
    max_concurrency: int
    memory_share: float
    servers: List[JobSpecRolloutServersItem]
    timeout_s: int


class JobSpecRuntime1(TypedDict, total=False):
    """The program that trains."""

    load_in_8bit: bool
    name: Literal["own", "trl", "auto"]
    offload: bool
    zero_stage: Optional[int]


class _McpToolsSpecRequired(TypedDict):
    allow: List[str]
    type: Literal["mcp"]
    url: str


class McpToolsSpec(_McpToolsSpecRequired, total=False):
    """Tools of an MCP server."""

    headers: Dict[str, str]
    name: str


class _HttpToolSpecRequired(TypedDict):
    name: str
    server_url: str
    type: Literal["http"]


class HttpToolSpec(_HttpToolSpecRequired, total=False):
    """A tool behind one address."""

    description: str
    headers: Dict[str, str]
    parameters: Dict[str, Any]


class JobSpecTraining(TypedDict, total=False):
    """Batches, length, seed."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"]
    dtype: Literal["f32", "bf16"]
    gradient_checkpointing: bool
    load_in_4bit: bool
    max_attempts: Optional[int]
    max_steps: int
    micro_batch_tokens: int
    num_train_epochs: float
    prompts_per_step: int
    seed: int
    shuffle_dataset: bool
    use_bnb_nested_quant: bool


class _JobSpecWarmStartAdapter1Required(TypedDict):
    hub: str


class JobSpecWarmStartAdapter1(_JobSpecWarmStartAdapter1Required, total=False):
    revision: str


class JobSpecWarmStartAdapter2(TypedDict):
    upload: str


class JobSpecWarmStartAdapter3(TypedDict):
    checkpoint: str


class _JobSpecWarmStartRequired(TypedDict):
    reference: Literal["base", "initial"]


class JobSpecWarmStart(_JobSpecWarmStartRequired, total=False):
    """Starts from the weights of a checkpoint or an adapter, with a fresh optimizer at step 0."""

    adapter: Union[JobSpecWarmStartAdapter1, JobSpecWarmStartAdapter2, JobSpecWarmStartAdapter3]
    checkpoint: str


class _JobSpecWarmUpRequired(TypedDict):
    dataset: Union[JobSpecDataset1, List[JobSpecDataset2Item]]
    steps: int


class JobSpecWarmUp(_JobSpecWarmUpRequired, total=False):
    """Supervised training steps before the first RLOO step: cross-entropy on the final assistant turn of each row, with the same adapter or weights."""

    batch_size: int
    learning_rate: float
    map: DatasetMap
    reference: Literal["base", "warmed"]


class _JobSpecRequired(TypedDict):
    dataset: Union[JobSpecDataset1, List[JobSpecDataset2Item]]
    model: str
    rewards: List[RewardSpec]


class JobSpec(_JobSpecRequired, total=False):
    """A job."""

    certificate: JobSpecCertificate
    checkpoints: JobSpecCheckpoints
    doctor: JobSpecDoctor
    early_stopping: JobSpecEarlyStopping
    environment: JobSpecEnvironment
    eval: JobSpecEval
    lora: Optional[JobSpecLora]
    metadata: Dict[str, str]
    name: str
    optimizer: JobSpecOptimizer
    priority: int
    resources: JobSpecResources
    rloo: JobSpecRloo
    rollout: JobSpecRollout
    runtime: Union[JobSpecRuntime1, Literal["own", "trl", "auto"]]
    sampling: GenerationRequestSampling
    tools: List[Union[McpToolsSpec, HttpToolSpec]]
    training: JobSpecTraining
    warm_start: JobSpecWarmStart
    warm_up: JobSpecWarmUp

MetricsRow = Dict[str, Any]

ModelTask = Literal["causal_lm", "sequence_classification"]


class _ModelCardRequired(TypedDict):
    architecture: str
    eos_token_ids: List[int]
    has_chat_template: bool
    hidden_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    num_parameters: int
    size_bytes: int
    vocab_size: int


class ModelCard(_ModelCardRequired, total=False):
    """Properties of a model."""

    labels: List[str]
    needs_runtime: Optional[RuntimeName]
    precision: Optional[str]
    task: ModelTask


class _ModelRequired(TypedDict):
    created_at: Time
    id: str
    owner: str
    private: bool
    sha256: str
    source: str
    state: str


class Model(_ModelRequired, total=False):
    """A model that jobs can use."""

    bytes_done: Optional[int]
    bytes_per_second: Optional[float]
    bytes_total: Optional[int]
    card: Optional[ModelCard]
    commit: Optional[str]
    eta_s: Optional[float]
    hub: Optional[str]
    problem: Optional[str]
    renamed_to: Optional[str]
    revision: Optional[str]


class ProblemItem(TypedDict):
    """One error in a request."""

    code: str
    detail: str
    pointer: str


class Problem(TypedDict):
    """The body of every error response: `application/problem+json` (RFC 9457)."""

    code: str
    detail: str
    errors: List[ProblemItem]
    request_id: str
    retryable: bool
    status: int
    title: str
    type: str


class PushError(TypedDict):
    """Why a push failed."""

    code: str
    message: str

PushFormat = Literal["adapter", "merged"]

PushId = str

PushStage = Literal["exporting", "uploading"]


class _PushRequired(TypedDict):
    card: bool
    checkpoint_id: CheckpointId
    created_at: Time
    format: PushFormat
    id: PushId
    job_id: JobId
    private: bool
    progress: TaskProgress
    repo: str
    revision: str
    state: TaskState
    step: int
    with_samples: bool


class Push(_PushRequired, total=False):
    """A push of a checkpoint to the model hub."""

    commit: Optional[str]
    dtype: Optional[ExportDtype]
    error: Optional[PushError]
    export_id: Optional[ExportId]
    finished_at: Optional[Time]
    is_new: Optional[bool]
    stage: Optional[PushStage]
    started_at: Optional[Time]
    url: Optional[str]


class _PushRequestRequired(TypedDict):
    repo: str


class PushRequest(_PushRequestRequired, total=False):
    """A request to push a checkpoint to a model hub."""

    card: bool
    dtype: Optional[ExportDtype]
    format: Optional[PushFormat]
    private: bool
    revision: Optional[str]
    with_samples: bool

EpisodeStop = Literal["env_done", "no_call", "max_turns", "max_tokens", "length", "parse_error", "failed"]


class _SampleTurnRequired(TypedDict):
    num_tokens: int
    text: str


class SampleTurn(_SampleTurnRequired, total=False):
    """A turn of an episode in a sample."""

    metrics: Dict[str, float]
    observation_tokens: int
    observations: List[Dict[str, Any]]
    observations_cut: int
    parse_error: Optional[str]
    reward: Optional[float]
    tool_calls: List[Dict[str, Any]]
    latency_ms: Optional[int]


class _SampleEpisodeRequired(TypedDict):
    stop: EpisodeStop
    turns: List[SampleTurn]

SampleEpisodeFields = TypedDict("SampleEpisodeFields", {"opening": "List[Dict[str, Any]]", "restarts": "int", "return": "Optional[float]"}, total=False)


class SampleEpisode(SampleEpisodeFields, total=False):
    """An episode in a sample."""

    pass

SamplePhase = Literal["train", "eval"]


class _SampleRequired(TypedDict):
    completion: str
    finish_reason: FinishReason
    group_id: str
    num_tokens: int
    phase: SamplePhase
    prompt: str
    prompt_id: str
    rewards: Dict[str, Optional[float]]
    step: int


class Sample(_SampleRequired, total=False):
    """One completion with its rewards and its advantage."""

    advantage: Optional[float]
    episode: Optional[SampleEpisode]
    kl: Optional[float]
    reward: Optional[float]


class _CheckpointsRequired(TypedDict):
    count: int


class Checkpoints(_CheckpointsRequired, total=False):
    """Checkpoints that can be downloaded."""

    best: Optional[Marked]
    last: Optional[Marked]


class _DurationsRequired(TypedDict):
    queued_s: float


class Durations(_DurationsRequired, total=False):
    """Durations of the job, in seconds."""

    mean_step_s: Optional[float]
    running_s: Optional[float]


class Course(TypedDict):
    """Development of a metric over the job."""

    best: float
    best_step: int
    change: float
    first: float
    last: float


class VerdictError(TypedDict):
    """Why a verdict failed."""

    code: str
    message: str

VerdictId = str

VerdictWord = Literal["better", "no_difference", "worse", "guard_fell", "too_few_rows"]


class _VerdictSummaryRequired(TypedDict):
    checkpoint_id: CheckpointId
    id: VerdictId
    state: TaskState
    step: int


class VerdictSummary(_VerdictSummaryRequired, total=False):
    """A short form of a verdict, for the summary of its job."""

    difference: Optional[float]
    error: Optional[VerdictError]
    interval: Optional[List[float]]
    note: Optional[str]
    rows: Optional[int]
    summary: Optional[str]
    verdict: Optional[VerdictWord]


class _SummaryRequired(TypedDict):
    alerts: List[JobAlert]
    checkpoints: Checkpoints
    durations: Durations
    id: JobId
    state: State
    step: int
    total_steps: int
    totals: Totals


class Summary(_SummaryRequired, total=False):
    """A job's key figures."""

    ending: Optional[JobEnding]
    eval_gap: Optional[float]
    eval_reward: Optional[Course]
    kl: Optional[float]
    num_tokens: Optional[float]
    reward: Optional[Course]
    training_phase: Optional[PhaseChange]
    verdict: Optional[VerdictSummary]


class PassAt(TypedDict):
    """The probability that at least one of `k` completions passes."""

    chance: float
    k: int


class ModelScore(TypedDict, total=False):
    """One model's results on the rows."""

    mean: Optional[float]
    pass_at: Optional[List[PassAt]]

Method = Literal["bca", "exact", "none"]


class _GuardResultRequired(TypedDict):
    base: ModelScore
    difference: float
    lost: int
    method: Method
    missing_rows: int
    rows: int
    tied: int
    trained: ModelScore
    won: int
    margin: float


class GuardResult(_GuardResultRequired, total=False):
    """Results on the guard set."""

    interval: Optional[List[float]]
    p_value: Optional[float]
    fell: Optional[bool]


class _JudgedTextRequired(TypedDict):
    completion: str
    finish_reason: FinishReason
    num_tokens: int


class JudgedText(_JudgedTextRequired, total=False):
    """A completion with its reward."""

    reward: Optional[float]


class _AnswersRequired(TypedDict):
    completions: List[JudgedText]


class Answers(_AnswersRequired, total=False):
    """One model's answers to a row."""

    reward: Optional[float]

RowOutcome = Literal["won", "lost", "tied", "missing"]

RowSet = Literal["test", "guard"]


class _VerdictRowRequired(TypedDict):
    base: Answers
    outcome: RowOutcome
    prompt: str
    row: int
    set: RowSet
    trained: Answers


class VerdictRow(_VerdictRowRequired, total=False):
    """A row judged with both models."""

    difference: Optional[float]

RowsFrom = Literal["test_fraction", "test_dataset", "eval"]


class _VerdictSamplingRequired(TypedDict):
    num_generations: int
    temperature: float


class VerdictSampling(_VerdictSamplingRequired, total=False):
    """How a verdict samples both models."""

    pass_threshold: Optional[float]


class _VerdictResultRequired(TypedDict):
    base: ModelScore
    difference: float
    lost: int
    method: Method
    missing_rows: int
    rows: int
    tied: int
    trained: ModelScore
    won: int
    lost_examples: List[VerdictRow]
    optimistic: bool
    rows_from: RowsFrom
    sampling: VerdictSampling
    summary: str
    verdict: VerdictWord
    won_examples: List[VerdictRow]


class VerdictResult(_VerdictResultRequired, total=False):
    """The comparison of the two models, and its conclusion."""

    interval: Optional[List[float]]
    p_value: Optional[float]
    guard: Optional[GuardResult]
    note: Optional[str]


class _VerdictRequired(TypedDict):
    checkpoint_id: CheckpointId
    created_at: Time
    id: VerdictId
    job_id: JobId
    progress: TaskProgress
    sampling: VerdictSampling
    state: TaskState
    step: int


class Verdict(_VerdictRequired, total=False):
    """A comparison of a checkpoint with its base model."""

    error: Optional[VerdictError]
    finished_at: Optional[Time]
    result: Optional[VerdictResult]
    started_at: Optional[Time]


class VerdictRequest(TypedDict, total=False):
    checkpoint: Union[Literal["last", "best", "result"], int, str]
    num_generations: int
    pass_threshold: float
    temperature: float
