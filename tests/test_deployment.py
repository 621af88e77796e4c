"""Launch configurations: what a shell and YAML make of them, and whether they agree with the plan."""

import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lessonlib.accelerators import get_accelerator
from lessonlib.capacity import plan
from lessonlib.capacity.deployment import (
    QUANTIZATION_BITS,
    Deployment,
    check_deployment,
    deployment_from_plan,
    kubernetes_manifest,
    ray_serve_config,
    vllm_command,
)
from lessonlib.models import get_model

H100, RTX_4090 = get_accelerator("h100-sxm"), get_accelerator("rtx-4090")
NAME = "meta-llama/Llama-3.1-70B-Instruct"
PLAN = plan(get_model("llama-3.1-70b"), H100, tensor_parallel=4, activation_bytes=2e9)

# What vLLM's own reference lists (docs.vllm.ai, engine arguments).
VLLM_FLAGS = {
    "--tensor-parallel-size", "--pipeline-parallel-size", "--gpu-memory-utilization", "--max-model-len",
    "--max-num-seqs", "--kv-cache-dtype", "--block-size", "--quantization", "--port",
}  # fmt: skip


def flags_of(command: str) -> dict[str, str]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    return dict(zip(words[3::2], words[4::2], strict=True))


def test_the_command_carries_the_plan():
    deployment = deployment_from_plan(PLAN, NAME, max_len=8192, typical_len=2000)
    command = vllm_command(deployment)
    assert shlex.split(command)[2] == NAME
    assert flags_of(command) == {
        "--tensor-parallel-size": "4", "--pipeline-parallel-size": "1", "--gpu-memory-utilization": "0.9",
        "--max-model-len": "8192", "--max-num-seqs": str(PLAN.requests_at(2000)), "--kv-cache-dtype": "auto",
        "--block-size": "16", "--port": "8000",
    }  # fmt: skip
    assert PLAN.requests_at(2000) > PLAN.requests_at(8192)
    assert deployment_from_plan(PLAN, NAME, 8192).max_sequences == PLAN.requests_at(8192)


def test_quantized_weights_and_cache():
    small = plan(get_model("llama-3.1-8b"), RTX_4090, weight_bits=4, group_size=128, kv_bits=8)
    flags = flags_of(vllm_command(deployment_from_plan(small, "org/model-awq", 4096, quantization="awq")))
    assert (flags["--quantization"], flags["--kv-cache-dtype"]) == ("awq", "fp8")
    assert set(flags) == VLLM_FLAGS
    with pytest.raises(ValueError, match=r"weights: no quantization is set: 16 bits.*the plan has 4"):
        deployment_from_plan(small, "org/model-awq", 4096)
    with pytest.raises(ValueError, match=r"kv_bits must be one of 16, 8, got 4"):
        deployment_from_plan(small.replan(kv_bits=4), "org/model-awq", 4096, quantization="awq")
    eight = small.replan(weight_bits=8)
    assert deployment_from_plan(eight, "m", 4096, quantization="gptq").quantization == "gptq"  # GPTQ has 8 bits too


def test_a_plan_without_room_for_the_longest_request():
    small = plan(get_model("llama-3.1-8b"), RTX_4090)  # the weights alone fit
    with pytest.raises(ValueError, match=r"plan must fit one request of max_len \(131,072\) tokens.*short by"):
        deployment_from_plan(small, NAME, 131_072)


def test_ray_serve():
    deployment = deployment_from_plan(PLAN, NAME, max_len=8192)
    config = yaml.safe_load(ray_serve_config(deployment, 1, 3, accelerator_type="H100"))
    [application] = config["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    [model] = application["args"]["llm_configs"]
    assert model["model_loading_config"] == {"model_id": "Llama-3.1-70B-Instruct", "model_source": NAME}
    assert model["engine_kwargs"] == deployment.engine_arguments()
    assert model["engine_kwargs"]["gpu_memory_utilization"] == 0.9
    assert model["deployment_config"]["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3}
    assert model["accelerator_type"] == "H100"
    with pytest.raises(ValueError, match="max_replicas must be a whole number of at least 2, got 1"):
        ray_serve_config(deployment, 2, 1)


def test_kubernetes():
    deployment = deployment_from_plan(PLAN, NAME, max_len=8192)
    workload, service = yaml.safe_load_all(kubernetes_manifest(deployment, replicas=2, token_secret="hub"))
    pod = workload["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert shlex.join(container["command"] + container["args"]) == vllm_command(deployment)
    assert all(isinstance(word, str) for word in container["args"])  # Kubernetes refuses numbers
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert workload["spec"]["replicas"] == 2
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == workload["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8000
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {pod["spec"]["volumes"][0]["name"]: "/dev/shm"}
    assert workload["metadata"]["name"] == "vllm-llama-3-1-70b-instruct"
    amd = yaml.safe_load_all(kubernetes_manifest(deployment, resource="amd.com/gpu"))
    assert next(amd)["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 4}
    two_stages = kubernetes_manifest(Deployment(NAME, tensor_parallel=4, pipeline_parallel=2))
    assert "nvidia.com/gpu: 8" in two_stages
    with pytest.raises(ValueError, match=r"resource must be like 'nvidia\.com/gpu', got 'gpu: 1'"):
        kubernetes_manifest(deployment, resource="gpu: 1")


@settings(max_examples=40, deadline=None)
@given(
    st.from_regex(r"(?!-)[A-Za-z0-9_./-]{0,80}[A-Za-z0-9_]", fullmatch=True),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30),
)
def test_no_name_changes_the_structure(name, text):
    deployment = Deployment(name)
    assert shlex.split(vllm_command(deployment))[2] == name
    workload, service = yaml.safe_load_all(kubernetes_manifest(deployment, image=text))
    container = workload["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["args"][0]) == (text, name)
    label = service["metadata"]["name"]
    assert 0 < len(label) <= 63 and label.strip("-") == label
    config = yaml.safe_load(ray_serve_config(deployment, accelerator_type=text))
    assert config["applications"][0]["args"]["llm_configs"][0]["accelerator_type"] == text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "qwen3-32b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-3-27b"]),
    st.sampled_from([1, 2, 4]), st.sampled_from([None, "fp8", "awq"]), st.sampled_from([16, 8]),
    st.integers(1, 32_768), st.floats(0.3, 1.0),
)  # fmt: skip
def test_what_comes_from_a_plan_agrees_with_it(key, ranks, quantization, kv_bits, max_len, share):
    model = get_model(key)
    bits = QUANTIZATION_BITS[quantization][0] if quantization else 16
    found = plan(
        model, H100, tensor_parallel=ranks, weight_bits=bits, kv_bits=kv_bits, memory_utilization=share,
        activation_bytes=[1e9] * ranks,
    )  # fmt: skip
    if not found.replan(context_len=max_len).fits:
        with pytest.raises(ValueError, match=r"plan must fit one request of max_len.*short by"):
            deployment_from_plan(found, "org/model", max_len, quantization=quantization)
        return
    if max_len > model.max_context:
        with pytest.raises(ValueError, match="max_len"):
            deployment_from_plan(found, "org/model", max_len, quantization=quantization)
        return
    deployment = deployment_from_plan(found, "org/model", max_len, quantization=quantization)
    assert check_deployment(deployment, found, typical_len=max_len) == ()


@pytest.mark.parametrize("text", ["", "\n", "\u00e4", "\U00010000", "\ud800", None])
def test_other_texts_are_refused(text):
    message = "must be 1 to 300 plain ASCII characters, got "
    with pytest.raises(ValueError, match=f"image {message}"):
        kubernetes_manifest(Deployment(NAME), image=text)
    if text is not None:
        with pytest.raises(ValueError, match=f"token_secret {message}"):
            kubernetes_manifest(Deployment(NAME), token_secret=text)
        with pytest.raises(ValueError, match=f"accelerator_type {message}"):
            ray_serve_config(Deployment(NAME), accelerator_type=text)


# --- what would go wrong --------------------------------------------------------------------------------------------


def outcomes(deployment: Deployment, found=PLAN, **options) -> dict[str, str]:
    return {finding.what: finding.outcome for finding in check_deployment(deployment, found, **options)}


def test_what_would_be_refused():
    assert outcomes(Deployment(NAME, tensor_parallel=6)) == {"tensor_parallel": "refused"}
    assert outcomes(Deployment(NAME, tensor_parallel=4, max_len=200_000)) == {"max_len": "refused"}
    assert outcomes(Deployment(NAME, tensor_parallel=4, pipeline_parallel=81)) == {"pipeline_parallel": "refused"}
    [finding] = check_deployment(Deployment(NAME, tensor_parallel=6), PLAN)
    assert str(finding).startswith("refused: tensor_parallel: it must divide the 64 query heads")


def test_what_would_not_fit():
    assert outcomes(Deployment(NAME, tensor_parallel=1)) == {
        "tensor_parallel": "differs", "weights": "does not fit",
    }  # fmt: skip
    # 4 bits were planned for: unquantized weights are four times as large
    four = plan(get_model("llama-3.1-70b"), H100, weight_bits=4, group_size=128)
    assert outcomes(Deployment(NAME), four) == {"weights": "does not fit"}
    findings = check_deployment(Deployment(NAME), four)
    assert [finding.outcome for finding in findings] == ["differs", "does not fit"]
    assert "no quantization is set" in findings[0].why and "short by" in findings[1].why
    # one request of the longest length
    tight = plan(get_model("llama-3.1-8b"), RTX_4090)
    [finding] = check_deployment(Deployment(NAME, max_len=131_072), tight)
    assert (finding.outcome, finding.what) == ("does not fit", "max_len")
    assert f"a context of {tight.longest_context():,} tokens" in finding.why
    assert outcomes(Deployment(NAME, max_len=tight.longest_context()), tight) == {}


def test_what_would_wait_or_differ():
    fit = PLAN.requests_at(4000)
    assert outcomes(Deployment(NAME, tensor_parallel=4, max_sequences=fit), typical_len=4000) == {}
    late = Deployment(NAME, tensor_parallel=4, max_sequences=fit + 1)
    assert outcomes(late, typical_len=4000) == {"max_sequences": "waits"}
    assert outcomes(late) == {}  # nobody said how long requests are
    changed = Deployment(NAME, tensor_parallel=8, memory_utilization=0.8, kv_dtype="fp8", block_size=32)
    assert outcomes(changed) == dict.fromkeys(
        ("tensor_parallel", "memory_utilization", "kv_bits", "block_size"), "differs"
    )
    uneven = plan(get_model("llama-3.1-8b"), RTX_4090, tensor_parallel=2, memory_bytes=(24e9, 12e9))
    assert outcomes(Deployment(NAME), uneven) == {"tensor_parallel": "differs", "weights": "does not fit"}  # on 12 GB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "a b"}, "model_name must be letters, digits and . _ - /"),
        ({"model_name": "--help"}, "model_name must be letters"),
        ({"model_name": "a\nb"}, "model_name must be letters"),
        ({"model_name": "$(x)"}, "model_name must be letters"),
        ({"model_name": None, "port": 0}, "port must be a whole number of at least 1, got 0"),
        ({"port": 70_000}, "port must be at most 65535, got 70000"),
        ({"memory_utilization": 1.5}, "memory_utilization must be above 0 and at most 1, got 1.5"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of auto, fp8, got 'int4'"),
        ({"quantization": "zip"}, "quantization must be one of awq, "),
        ({"block_size": 17}, "block_size must be one of 1, 8, 16"),
        ({"max_sequences": 0}, "max_sequences must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_settings_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Deployment(**{"model_name": NAME, **options})
