"""From a plan to a running service: launch configurations for engines that exist, and a check of what they would do.

Nothing here serves a model. vLLM runs on one machine or several, Ray Serve and Kubernetes keep copies of it running;
their settings follow from the memory plan, and a setting that does not is found before anything is started.
Sources: vLLM's engine arguments, Ray Serve's LLMConfig, Kubernetes' Deployment and Service.
"""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any, Literal

from lessonlib import kv_cache
from lessonlib.capacity.memory import MemoryPlan
from lessonlib.checks import check_choice, check_count, check_share
from lessonlib.units import fmt

KV_DTYPES = {"auto": 16, "fp8": 8}
"""values of vLLM's --kv-cache-dtype, and the bits each stores"""
QUANTIZATION_BITS = {
    "awq": (4,),
    "awq_marlin": (4,),
    "gptq": (4, 8, 3, 2),
    "gptq_marlin": (4, 8),
    "bitsandbytes": (4, 8),
    "compressed-tensors": (8, 4),
    "fp8": (8,),
}
"""values of vLLM's --quantization, and the bits a weight can have in each, the usual one first"""
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
IMAGE = "vllm/vllm-openai:latest"
ACCELERATOR_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Google": "google.com/tpu"}


@dataclass(frozen=True)
class Deployment:
    """What is set when a model is served. Raises ValueError for what no engine could mean."""

    model_name: str
    """where the weights are: a name on a hub, or a path"""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    memory_utilization: float = 0.9
    max_len: int = 4096
    """tokens of the longest request, prompt and output"""
    max_sequences: int = 256
    """requests in one step"""
    quantization: str | None = None
    """how the weights are stored, of QUANTIZATION_BITS; None: 16 bits, unless the files themselves are quantized"""
    kv_dtype: str = "auto"
    """of KV_DTYPES"""
    block_size: int = 16
    port: int = 8000

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(?!-)[\w./-]{0,199}\w", str(self.model_name), re.ASCII):
            raise ValueError(
                "model_name must be letters, digits and . _ - /, such as 'org/model', and neither begin with - nor end "
                f"with a sign, got {str(self.model_name)[:80]!r}"
            )
        for name in ("tensor_parallel", "pipeline_parallel", "max_len", "max_sequences", "port"):
            check_count(name, getattr(self, name))
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        check_share("memory_utilization", self.memory_utilization)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATION_BITS)
        check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        check_choice("block_size", self.block_size, BLOCK_SIZES)

    def engine_arguments(self) -> dict[str, Any]:
        """The settings under vLLM's names for them."""
        arguments: dict[str, Any] = {
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "gpu_memory_utilization": self.memory_utilization,
            "max_model_len": self.max_len,
            "max_num_seqs": self.max_sequences,
            "kv_cache_dtype": self.kv_dtype,
            "block_size": self.block_size,
        }
        if self.quantization:
            arguments["quantization"] = self.quantization
        return arguments


def deployment_from_plan(
    plan: MemoryPlan, model_name: str, max_len: int, typical_len: int | None = None, quantization: str | None = None
) -> Deployment:
    """The deployment that a memory plan stands for.

    As many requests are allowed in a step as fit at `typical_len` tokens each (None: at `max_len`). Weights of fewer
    than 16 bits need `quantization`, the name of their format. Raises ValueError for a plan that does not fit one
    request of `max_len` tokens, and for KV bits that vLLM does not have.
    """
    fitting = plan.replan(context_len=check_count("max_len", max_len), batch_size=1)
    if not fitting.fits:
        raise ValueError(f"plan must fit one request of max_len ({max_len:,}) tokens. {fitting.message}")
    names = {bits: name for name, bits in KV_DTYPES.items()}
    deployment = Deployment(
        model_name,
        plan.tensor_parallel,
        plan.pipeline_parallel,
        plan.memory_utilization,
        max_len,
        max(1, plan.requests_at(max_len if typical_len is None else check_count("typical_len", typical_len))),
        quantization,
        names[int(check_choice("kv_bits", plan.kv_bits, names))],
        plan.block_size,
    )
    if wrong := check_deployment(deployment, plan):
        raise ValueError(f"deployment must agree with the plan: {wrong[0].what}: {wrong[0].why}")
    return deployment


# --- launch configurations ------------------------------------------------------------------------------------------


def vllm_command(deployment: Deployment) -> str:
    """The shell command that starts vLLM's OpenAI-compatible server."""
    return shlex.join(["vllm", "serve", *_server_arguments(deployment)])


def _server_arguments(deployment: Deployment) -> list[str]:
    flags = {**deployment.engine_arguments(), "port": deployment.port}
    pairs = ([f"--{name.replace('_', '-')}", str(value)] for name, value in flags.items())
    return [deployment.model_name, *(word for pair in pairs for word in pair)]


def ray_serve_config(
    deployment: Deployment, min_replicas: int = 1, max_replicas: int = 1, accelerator_type: str | None = None
) -> str:
    """The YAML for `serve run`: Ray Serve starts, balances and scales copies of the engine.

    `accelerator_type` is Ray's name for the device, such as "H100". Raises ValueError for replicas below 1, a
    maximum below the minimum, and a name with other than plain ASCII characters.
    """
    replicas = {"min_replicas": check_count("min_replicas", min_replicas)}
    replicas["max_replicas"] = check_count("max_replicas", max_replicas, min_replicas)
    config: dict[str, Any] = {
        "model_loading_config": {
            "model_id": deployment.model_name.rsplit("/", 1)[-1],
            "model_source": deployment.model_name,
        },
        "deployment_config": {"autoscaling_config": replicas},
        "engine_kwargs": deployment.engine_arguments(),
    }
    if accelerator_type is not None:
        config["accelerator_type"] = _check_plain("accelerator_type", accelerator_type)
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    return _yaml({"applications": [application], "http_options": {"host": "0.0.0.0", "port": deployment.port}})


def kubernetes_manifest(
    deployment: Deployment,
    replicas: int = 1,
    image: str = IMAGE,
    resource: str = "nvidia.com/gpu",
    token_secret: str | None = None,
) -> str:
    """The YAML for `kubectl apply`: a Deployment of vLLM and a Service in front of it.

    All accelerators of one copy must be in one machine. `resource` names them (ACCELERATOR_RESOURCES), `token_secret`
    is a Secret whose key "token" gives access to gated weights. Pin `image` to a version before you rely on it.
    Raises ValueError for replicas below 1, a resource that is not like "vendor.com/gpu", and names with other than
    plain ASCII characters.
    """
    _check_plain("image", image)
    if not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", resource, re.ASCII):
        raise ValueError(f"resource must be like 'nvidia.com/gpu', got {resource!r}")
    name = re.sub(r"[^a-z0-9]+", "-", deployment.model_name.rsplit("/", 1)[-1].lower())[:50].strip("-") or "model"
    labels = {"app": f"vllm-{name}"}
    num_accelerators = deployment.tensor_parallel * deployment.pipeline_parallel
    probe = {"httpGet": {"path": "/health", "port": deployment.port}, "periodSeconds": 10}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image,
        "command": ["vllm", "serve"],
        "args": _server_arguments(deployment),
        "ports": [{"containerPort": deployment.port}],
        "resources": {"limits": {resource: num_accelerators}},
        # loading takes minutes: the start-up probe allows for an hour before the others count
        "startupProbe": {**probe, "failureThreshold": 360},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if token_secret is not None:
        secret = {"secretKeyRef": {"name": _check_plain("token_secret", token_secret), "key": "token"}}
        container["env"] = [{"name": "HF_TOKEN", "valueFrom": secret}]
    # the ranks of one copy exchange tensors through shared memory
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    workload = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels["app"], "labels": labels},
        "spec": {
            "replicas": check_count("replicas", replicas),
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": labels["app"], "labels": labels},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": deployment.port}]},
    }
    return f"{_yaml(workload)}---\n{_yaml(service)}"


def _check_plain(name: str, value: str) -> str:
    """Beyond ASCII JSON and YAML differ."""
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,300}", value):
        raise ValueError(f"{name} must be 1 to 300 plain ASCII characters, got {str(value)[:80]!r}")
    return value


def _yaml(value: dict[str, Any] | list[Any], indent: int = 0) -> str:
    """Maps and lists as indented YAML. Every leaf is ASCII JSON, which YAML contains: no text changes the structure."""
    pad = "  " * indent
    lines = []
    if isinstance(value, list):
        for item in value:
            block = _yaml(item, indent + 1) if isinstance(item, dict) else f"{pad}  {json.dumps(item)}\n"
            lines.append(f"{pad}- {block[len(pad) + 2 :]}")  # the first line follows the dash
        return "".join(lines)
    for key, item in value.items():
        lines.append(f"{pad}{key}:\n{_yaml(item, indent + 1)}" if isinstance(item, dict | list)
                     else f"{pad}{key}: {json.dumps(item)}\n")  # fmt: skip
    return "".join(lines)


# --- does it agree with the plan? -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One setting that would go wrong: what the engine would do, which setting, and why."""

    outcome: Literal["refused", "does not fit", "waits", "differs"]
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.what}: {self.why}"


def check_deployment(deployment: Deployment, plan: MemoryPlan, typical_len: int | None = None) -> tuple[Finding, ...]:
    """What would be refused, would not fit, or differs from the plan; empty if the deployment agrees with it.

    With `typical_len` (tokens) also whether `max_sequences` such requests fit at once. Memory, activations and other
    sizes are the plan's.
    """
    if refused := _refused(deployment, plan):
        return refused
    possible = QUANTIZATION_BITS[deployment.quantization] if deployment.quantization else (16,)
    bits = plan.weight_bits if plan.weight_bits in possible else possible[0]
    changes: dict[str, Any] = {
        "tensor_parallel": deployment.tensor_parallel,
        "pipeline_parallel": deployment.pipeline_parallel,
        "memory_utilization": deployment.memory_utilization,
        "kv_bits": KV_DTYPES[deployment.kv_dtype],
        "block_size": deployment.block_size,
        "context_len": deployment.max_len,
        "batch_size": 1,
    }
    findings = []
    if bits != plan.weight_bits:
        why = f"{deployment.quantization} means {bits} bits, the plan has {plan.weight_bits}"
        if not deployment.quantization:
            why = f"no quantization is set: 16 bits, unless the files are quantized; the plan has {plan.weight_bits}"
        findings.append(Finding("differs", "weights", why))
        changes.update(weight_bits=bits, group_size=128 if bits < 8 else None)
    layout = ("tensor_parallel", "pipeline_parallel")
    if any(changes[name] != getattr(plan, name) for name in layout):
        changes["stage_layers"] = None
        for name in ("memory_bytes", "activation_bytes", "other_bytes"):
            if isinstance(plan.options[name], tuple):  # of other accelerators: take the worst
                changes[name] = (min if name == "memory_bytes" else max)(plan.options[name])
    for name in (*layout, "memory_utilization", "kv_bits", "block_size"):
        if changes[name] != getattr(plan, name):
            findings.append(Finding("differs", name, f"{changes[name]}, the plan has {getattr(plan, name)}"))
    actual = plan.replan(**changes)
    if not actual.fits:
        what = "max_len" if not actual.tightest.short_bytes else "weights"
        findings.append(Finding("does not fit", what, actual.message))
    elif typical_len is not None and deployment.max_sequences > (fit := actual.requests_at(typical_len)):
        why = f"{deployment.max_sequences} are allowed, {fit} of {typical_len:,} tokens fit: the rest is preempted"
        findings.append(Finding("waits", "max_sequences", why))
    return tuple(findings)


def _refused(deployment: Deployment, plan: MemoryPlan) -> tuple[Finding, ...]:
    """What an engine does not even try."""
    findings = []
    model = plan.model
    try:
        kv_cache.kv_shards(model, deployment.tensor_parallel)
    except ValueError as error:
        findings.append(Finding("refused", "tensor_parallel", str(error).replace("num_accelerators", "it")))
    if deployment.pipeline_parallel > model.num_layers:
        why = f"{deployment.pipeline_parallel} stages for the {model.num_layers} layers of {model.name}"
        findings.append(Finding("refused", "pipeline_parallel", why))
    if deployment.max_len > model.max_context:
        why = f"{fmt(deployment.max_len)} tokens, but {model.name} knows at most {fmt(model.max_context, digits=7)}"
        findings.append(Finding("refused", "max_len", why))
    return tuple(findings)
