"""Start-up logs: the rows of engine_logs.csv as engines print them, other engines, and text that is none.

The logs are written for these tests, in the wordings that engines use; the numbers are those of the rows' sources.
"""

import csv
import dataclasses
import random
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lessonlib import capacity
from lessonlib.capacity import compare_log, engine_logs, read_engine_log
from lessonlib.models import ModelConfig, get_model

GIB, MIB = 2**30, 2**20
DATA = Path(__file__).parent / "data" / "engine_logs.csv"

LOGS = {
    "L1": """\
INFO 11-21 08:01:12 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-21 08:01:14 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.36GiB \
peak_torch_memory=17.06GiB memory_usage_post_profile=15.46GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB \
gpu_memory_utilization=0.90
INFO 11-21 08:01:14 gpu_executor.py:113] # GPU blocks: 1952, # CPU blocks: 2048
INFO 11-21 08:01:14 gpu_executor.py:117] Maximum concurrency for 20000 tokens per request: 1.56x
INFO:     Application startup complete.
""",
    "L2": """\
INFO 11-21 08:11:30 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-21 08:11:32 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.36GiB \
peak_torch_memory=17.98GiB memory_usage_post_profile=15.46GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB \
gpu_memory_utilization=0.90
INFO 11-21 08:11:32 gpu_executor.py:113] # GPU blocks: 1478, # CPU blocks: 2048
INFO 11-21 08:11:32 gpu_executor.py:117] Maximum concurrency for 29000 tokens per request: 0.82x
ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV \
cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
""",
    "L3": """\
INFO 02-10 20:01:02 config.py:101] Initializing with tensor_parallel_size=2, pipeline_parallel_size=1
(VllmWorkerProcess pid=91) INFO 02-10 20:02:11 model_runner.py:1115] Loading model weights took 13.9476 GB
INFO 02-10 20:02:12 model_runner.py:1115] Loading model weights took 13.9476 GB
INFO 02-10 20:02:19 worker.py:267] the current vLLM instance can use total_gpu_memory (23.55GiB) x \
gpu_memory_utilization (0.98) = 23.08GiB
INFO 02-10 20:02:19 worker.py:267] model weights take 13.95GiB; non_torch_memory takes 0.25GiB; PyTorch activation \
peak memory takes 0.19GiB; the rest of the memory reserved for KV Cache is 8.69GiB.
INFO 02-10 20:02:19 executor_base.py:110] # CUDA blocks: 5096, # CPU blocks: 2730
ERROR 02-10 20:02:19 engine.py:389] The model's max seq len (131072) is larger than the maximum number of tokens \
that can be stored in KV cache (81536).
""",
    "L4": """\
INFO 12-17 02:33:01 config.py:905] Defaulting to use mp for distributed inference, tensor_parallel_size=2
INFO 12-17 02:33:40 model_runner.py:1092] Loading model weights took 7.5122 GB
INFO 12-17 02:33:46 worker.py:241] the current vLLM instance can use total_gpu_memory (15.77GiB) x \
gpu_memory_utilization (0.95) = 14.98GiB
INFO 12-17 02:33:46 worker.py:241] model weights take 7.51GiB; non_torch_memory takes 0.39GiB; PyTorch activation \
peak memory takes 2.53GiB; the rest of the memory reserved for KV Cache is 4.55GiB.
INFO 12-17 02:33:46 distributed_gpu_executor.py:57] # GPU blocks: 4660, # CPU blocks: 4096
INFO 12-17 02:33:46 distributed_gpu_executor.py:61] Maximum concurrency for 40000 tokens per request: 1.86x
""",
    "L5": """\
(EngineCore_DP0 pid=88) INFO 09-21 09:10:41 [gpu_model_runner.py:2338] Model loading took 29.0900 GiB and 21.4 seconds
(EngineCore_DP0 pid=88) INFO 09-21 09:10:59 [gpu_worker.py:298] Available KV cache memory: 10.55 GiB
(EngineCore_DP0 pid=88) INFO 09-21 09:10:59 [kv_cache_utils.py:864] GPU KV cache size: 230,528 tokens
(EngineCore_DP0 pid=88) INFO 09-21 09:10:59 [kv_cache_utils.py:868] Maximum concurrency for 100,000 tokens per \
request: 2.31x
""",
    "L6": """\
(APIServer pid=1) INFO 02-08 07:30:01 [utils.py:233] non-default args: gpu_memory_utilization=0.90, \
pipeline_parallel_size=2
(Worker_PP0 pid=70) INFO 02-08 07:31:20 [gpu_worker.py:355] Available KV cache memory: 3.18 GiB
(Worker_PP1 pid=71) INFO 02-08 07:31:21 [gpu_worker.py:355] Available KV cache memory: 7.41 GiB
(EngineCore_DP0 pid=60) ValueError: To serve at least one request with the models's max seq len (262144), (24.00 GiB \
KV cache is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the
estimated maximum model length is 34736. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.
""",
    "L7": """\
INFO 01-30 15:20:09 model_runner.py:1111] Loading model weights took 67.7229 GB
INFO 01-30 15:20:30 worker.py:266] the rest of the memory reserved for KV Cache is 6.74GiB.
INFO 01-30 15:20:30 executor_base.py:108] # CUDA blocks: 1381, # CPU blocks: 819
INFO 01-30 15:20:30 executor_base.py:113] Maximum concurrency for 2048 tokens per request: 10.79x
""",
    "L8": """\
INFO 02-26 09:54:02 model_runner.py:1115] Loading model weights took 5.2032 GB
INFO 02-26 09:54:05 worker.py:267] Memory profiling takes 3.25 seconds
INFO 02-26 09:54:05 worker.py:267] the current vLLM instance can use total_gpu_memory (8.00GiB) x \
gpu_memory_utilization (0.70) = 5.60GiB
INFO 02-26 09:54:05 worker.py:267] model weights take 5.20GiB; non_torch_memory takes 0.03GiB; PyTorch activation \
peak memory takes 1.42GiB; the rest of the memory reserved for KV Cache is -1.05GiB.
INFO 02-26 09:54:05 executor_base.py:111] # cuda blocks: 0, # CPU blocks: 4681
INFO 02-26 09:54:05 executor_base.py:116] Maximum concurrency for 4096 tokens per request: 0.00x
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.
""",
    "L9": """\
INFO 01-22 19:13:38 worker.py:243] Memory profiling results:
INFO 01-22 19:13:38 worker.py:243] duration     2.75 seconds
INFO 01-22 19:13:38 worker.py:243] total_gpu_memory     39.50GiB
INFO 01-22 19:13:38 worker.py:243] gpu_memory_utilization       0.90
INFO 01-22 19:13:38 worker.py:243] model weights take   14.96GiB
INFO 01-22 19:13:38 worker.py:243] non_torch_memory     0.10GiB
INFO 01-22 19:13:38 worker.py:243] PyTorch activation peak memory       9.37GiB
INFO 01-22 19:13:38 worker.py:243] available_kv_cache_memory    11.12GiB
INFO 01-22 19:13:38 gpu_executor.py:76] # GPU blocks: 5691, # CPU blocks: 2048
INFO 01-22 19:13:38 gpu_executor.py:80] Maximum concurrency for 8192 tokens per request: 11.12x
""",
    "L10": """\
INFO 06-02 11:00:00 [gpu_worker.py:355] Available KV cache memory: 5.055 GiB
INFO 06-02 11:00:00 [kv_cache_utils.py:1286] GPU KV cache size: 41,408 tokens
INFO 06-02 11:00:00 [kv_cache_utils.py:407] # GPU blocks: 2588
INFO 06-02 11:00:00 [worker.py:267] total_gpu_memory (24.00GiB) x gpu_memory_utilization (0.90) = 21.60GiB
""",
    "L11": """\
INFO 12-01 10:00:00 [gpu_worker.py:355] Available KV cache memory: 12116 MiB
INFO 12-01 10:00:00 [kv_cache_utils.py:407] # GPU blocks: 5385
""",
    "L12": """\
INFO 02-20 11:11:11 [kv_cache_utils.py:407] # GPU blocks: 127626
INFO 02-20 11:11:11 [kv_cache_utils.py:410] Maximum concurrency for 2048 tokens per request: 997.08x
INFO 02-20 11:11:11 [kv_cache_utils.py:634] GPU KV cache size: 2,042,016 tokens
""",
    "L13": """\
ValueError: To serve at least one request with the models's max seq len (3072), (0.16 GiB KV cache is needed, which is \
larger than the available KV cache memory (0.12 GiB).
""",
    "L14": """\
(VllmWorker rank=0 pid=40) INFO 04-14 14:23:05 [config.py:1] tensor_parallel_size=4
(VllmWorker rank=1 pid=52) INFO 04-14 14:23:05 [gpu_model_runner.py:1273] Model loading took 34.4300 GiB and 21.1 s
(VllmWorker rank=1 pid=52) INFO 04-14 14:23:09 [worker.py:267] the current vLLM instance can use total_gpu_memory \
(39.38GiB) x gpu_memory_utilization (0.95) = 37.41GiB
(VllmWorker rank=1 pid=52) INFO 04-14 14:23:09 [worker.py:267] model weights take 34.43GiB; non_torch_memory takes \
0.43GiB; PyTorch activation peak memory takes 2.51GiB; the rest of the memory reserved for KV Cache is 0.04GiB.
(VllmWorker rank=3 pid=54) INFO 04-14 14:23:09 [worker.py:267] the rest of the memory reserved for KV Cache is 0.07GiB.
ERROR 04-14 14:23:10 [core.py:390] ValueError: To serve at least one request with the models's max seq len (8192), \
(0.62 GiB KV cache is needed, which is larger than the available KV cache memory (0.04 GiB).
""",
}


def row(row_id: str) -> dict[str, str]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return next(found for found in csv.DictReader(file) if found["id"] == row_id)


def rows_of(row_id: str, key: str, **options) -> dict[str, engine_logs.LogRow]:
    model = key if isinstance(key, ModelConfig) else get_model(key)
    return {found.what: found for found in compare_log(read_engine_log(LOGS[row_id]), model, **options)}


# --- every row is read ----------------------------------------------------------------------------------------------


def test_no_row_is_forgotten():
    with DATA.open(encoding="utf-8", newline="") as file:
        assert [found["id"] for found in csv.DictReader(file)] == list(LOGS)


@pytest.mark.parametrize("row_id", LOGS)
def test_sizes_are_read_as_the_row_has_them(row_id):
    log, expected = read_engine_log(LOGS[row_id]), row(row_id)
    assert log.engine == "vLLM"
    for name, found in (
        ("weights_gib", log.weights_bytes), ("activation_gib", log.activation_bytes), ("other_gib", log.other_bytes),
        ("total_gib", log.total_bytes), ("kv_gib", log.kv_bytes),
    ):  # fmt: skip
        if expected[name] and row_id not in ("L8", "L13") and not (row_id == "L7" and name == "total_gib"):
            assert found / GIB == pytest.approx(float(expected[name].split()[0]), abs=0.0051), name
    if expected["utilization"] and row_id not in ("L7", "L11"):
        assert log.utilization == float(expected["utilization"])


@pytest.mark.parametrize(
    ("row_id", "blocks", "tokens", "max_len", "concurrency", "refused"),
    [
        ("L1", 1952, 31_232, 20_000, 1.56, False),
        ("L2", 1478, 23_648, 29_000, 0.82, True),
        ("L3", 5096, 81_536, 131_072, 0.622, True),
        ("L4", 4660, 74_560, 40_000, 1.86, False),
        ("L5", None, 230_528, 100_000, 2.31, False),
        ("L6", None, None, 262_144, None, True),
        ("L7", 1381, 22_096, 2048, 10.79, False),
        ("L8", 0, 0, 4096, 0.0, True),
        ("L9", 5691, 91_056, 8192, 11.12, False),
        ("L10", 2588, 41_408, None, None, False),
        ("L11", 5385, 86_160, None, None, False),
        ("L12", 127_626, 2_042_016, 2048, 997.08, False),
        ("L13", None, None, 3072, None, True),
        ("L14", None, None, 8192, None, True),
    ],
)
def test_counts(row_id, blocks, tokens, max_len, concurrency, refused):
    log = read_engine_log(LOGS[row_id])
    assert (log.num_blocks, log.num_tokens, log.max_len, log.refused) == (blocks, tokens, max_len, refused)
    assert log.concurrency == (None if concurrency is None else pytest.approx(concurrency, abs=0.001))
    assert log.fits is not refused
    if blocks is not None:
        printed = row(row_id)["logged"].replace(",", "")
        assert str(blocks) in printed or str(tokens) in printed


# --- and compared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_id", "key", "options"),
    [
        ("L1", "llama-3.1-8b", {}),
        ("L2", "llama-3.1-8b", {}),
        ("L4", "llama-3.1-8b", {}),
        ("L5", "qwen3-30b-a3b", {"weight_bits": 8, "kv_bits": 8, "unquantized": ("embedding", "head")}),
        ("L7", "llama-3.1-70b", {"weight_bits": 8, "unquantized": ("embedding", "head")}),
        ("L9", "llama-3.1-8b", {}),
        ("L11", "qwen3-4b", {}),
    ],
)
def test_logs_that_the_plan_predicts(row_id, key, options):
    rows = rows_of(row_id, key, **options)
    assert "tokens" in rows
    for name, found in rows.items():
        assert found.agrees, f"{name}: {found}"


def test_l2_says_why_it_was_refused():
    assert "less than one request of 29,000 tokens" in rows_of("L2", "llama-3.1-8b")["concurrency"].explanation


def test_l3_the_tightest_rank_decides():
    model = ModelConfig(
        name="Qwen 14B", num_layers=48, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
        intermediate_size=13824, vocab_size=152064, max_context=131072, qkv_bias=True,
    )  # fmt: skip
    rows = rows_of("L3", model)
    assert rows["KV cache"].agrees  # 8.69 GiB is what is left on this rank
    tokens = rows["tokens"]
    assert not tokens.agrees and tokens.logged == 81_536
    assert tokens.predicted == pytest.approx(8.69 * GIB / 98_304)
    assert tokens.explanation.startswith("the tightest accelerator decides: its cache is 7.465 GiB, this one has 8.69")


def test_l6_the_engine_counts_all_layers():
    rows = rows_of("L6", "qwen3-30b-a3b", stage_layers=(16, 32))
    needed = rows["cache of one request"]
    assert (needed.logged / GIB, needed.predicted / GIB, needed.ratio) == (24.0, 16.0, 1.5)
    assert "counts all layers" in needed.explanation
    estimate = rows["longest length"]
    assert estimate.logged == 34_736 and estimate.predicted == pytest.approx(1.5 * 34_736, rel=0.002)
    assert "counts all layers" in estimate.explanation


def test_l7_embedding_and_head_at_16_bits_explain_the_weights():
    weights = rows_of("L7", "llama-3.1-70b", weight_bits=8)["weights"]
    assert weights.predicted / GIB == pytest.approx(65.71, abs=0.005) and not weights.agrees
    assert weights.explanation == "embedding and head stay at 16 bits: 67.67 GiB"


def test_l8_is_short_by_1_05_and_nothing_is_negative():
    log = read_engine_log(LOGS["L8"])
    assert log.short_bytes == pytest.approx(1.05 * GIB) and log.kv_bytes == 0 and not log.fits
    assert "It does not fit, short by 1.05 GiB" in log.message
    rows = rows_of("L8", "qwen2.5-7b", weight_bits=4, group_size=128, unquantized=("embedding", "head"))
    assert rows["KV cache"].explanation == "does not fit, short by 1.053 GiB"  # with weights to four decimals
    assert (rows["KV cache"].logged, rows["KV cache"].predicted, rows["KV cache"].ratio) == (0, 0, None)
    assert all(found.logged >= 0 and found.predicted >= 0 for found in rows.values())


def test_l10_activations_are_not_free():
    budget = rows_of("L10", "llama-3.1-8b")["KV cache"]
    assert budget.predicted / GIB == pytest.approx(0.9 * 24 - 14.957, abs=0.001)
    assert "activations are not free: 1.587 GiB go to them" in budget.explanation
    assert rows_of("L10", "llama-3.1-8b")["tokens"].agrees


def test_l13_one_request_and_28_times_too_much():
    needed = rows_of("L13", "qwen2.5-7b")["cache of one request"]
    assert needed.predicted == 3072 * 57_344
    assert f"{needed.predicted / GIB:.2f}" == "0.16" and needed.logged == 0.16 * GIB
    assert 57_344 * 7 * 4 == 1_605_632  # the reporter's: query heads for KV heads, bits for bytes


def test_l14_537_tokens_on_the_tightest_of_four():
    log = read_engine_log(LOGS["L14"])
    assert log.kv_bytes == 0.04 * GIB  # of 0.04 and 0.07
    rows = rows_of("L14", "qwen2.5-72b")
    assert rows["KV cache"].predicted / (81_920) == pytest.approx(537, abs=1)
    assert rows["KV cache"].explanation == "as near as the two decimals of the log allow"  # 0.041 GiB
    needed = rows["cache of one request"]
    assert needed.agrees and needed.predicted == 8192 * 81_920


@pytest.mark.parametrize(
    ("text", "key", "options", "what", "explanation"),
    [
        ("Loading model weights took 16.0605 GB", "llama-3.1-8b", {}, "weights", "GiB read as GB"),
        ("Loading model weights took 13.93 GiB", "llama-3.1-8b", {}, "weights", "GB read as GiB"),
        ("Loading model weights took 14.96 GB", "llama-3.1-8b", {"weight_bits": 8}, "weights", "weights of 16 bits"),
        ("Model loading took 14.96 GiB", "llama-3.1-8b", {"tensor_parallel": 4}, "weights", "of all accelerators"),
        (
            "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 16,384 tokens",
            "llama-3.1-8b", {}, "tokens", "a KV cache of 8 bits",
        ),
        (
            "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 2,048 tokens",
            "llama-3.1-8b", {}, "tokens", "query heads counted for KV heads",
        ),
        (
            "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 8,192 tokens",
            "llama-3.1-8b", {"tensor_parallel": 8}, "tokens", "the KV heads are not divided",
        ),
        (
            "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 65,536 tokens",
            "llama-3.1-8b", {"tensor_parallel": 16}, "tokens", "divided by 8 only, and replicated beyond: 16",
        ),
    ],
)  # fmt: skip
def test_known_ratios_are_explained(text, key, options, what, explanation):
    rows = {found.what: found for found in compare_log(read_engine_log(text), get_model(key), **options)}
    assert explanation in rows[what].explanation
    assert explanation in str(rows[what])


# --- other wordings and engines -------------------------------------------------------------------------------------


def test_vllm_of_other_generations():
    v1_debug = """Total non KV cache memory: 20.19GiB; torch peak memory increase: 1.42GiB;
        non-torch forward increase memory: 0.51GiB; weights memory: 18.26GiB.
        ValueError: Free memory on device cuda:0 (34.34/121.63 GiB) on startup
        is less than desired GPU memory utilization (0.8, 97.3 GiB)."""
    log = read_engine_log(v1_debug)
    assert (log.weights_bytes, log.activation_bytes, log.other_bytes) == (18.26 * GIB, 1.42 * GIB, 0.51 * GIB)
    assert (log.total_bytes, log.utilization, log.refused) == (121.63 * GIB, 0.8, True)
    assert (len(log.recognized), log.unrecognized) == (4, 0)

    # no parenthesis before the size, and "memory" after it
    newest = """Model loading took 2.89 GiB memory and 60.297843 seconds
        with max seq len (262144), 9.29 GiB KV cache is needed, which is larger than the available KV cache memory
        (9.28 GiB). Based on the available memory, the estimated maximum model length is 260800."""
    log = read_engine_log(newest)
    assert (log.weights_bytes, log.needed_bytes, log.kv_bytes) == (2.89 * GIB, 9.29 * GIB, 9.28 * GIB)
    assert (log.max_len, log.estimated_len, log.refused) == (262_144, 260_800, True)
    negative = read_engine_log("Available KV cache memory: -2.81 GiB")
    assert (negative.kv_bytes, negative.short_bytes) == (0, 2.81 * GIB)


def test_sglang():
    text = """\
[2025-11-04 05:26:50] server_args=ServerArgs(model_path='m', tp_size=2, mem_fraction_static=0.88, ep_size=1)
[2025-11-04 05:27:13 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=64.06 GB, \
mem usage=7.51 GB.
[2025-11-04 05:27:13 TP0] KV Cache is allocated. #tokens: 131072, K size: 4.00 GB, V size: 4.00 GB
[2025-11-04 05:27:13 TP1] KV Cache is allocated. #tokens: 131072, K size: 4.00 GB, V size: 4.00 GB
[2025-11-04 05:27:14 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 131072, K size: 0.13 GB, \
V size: 0.13 GB
[2025-11-04 05:27:30 TP0] Capture cuda graph end. Time elapsed: 8.04 s. mem usage=0.80 GB. avail mem=10.30 GB.
[2025-11-04 05:27:31 TP0] max_total_num_tokens=131072, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=2048, context_len=32768
"""
    log = read_engine_log(text)
    assert log.engine == "SGLang"
    assert (log.weights_bytes, log.kv_bytes) == (7.51 * GIB, pytest.approx(8 * GIB, rel=1e-9))  # not the draft's
    assert (log.num_tokens, log.max_len, log.concurrency) == (131_072, 32_768, 4.0)
    assert (log.utilization, log.tensor_parallel, log.unrecognized) == (0.88, 2, 1)  # the graph capture
    rows = {found.what: found for found in compare_log(log, get_model("llama-3.1-8b"))}
    assert rows["weights"].agrees and rows["tokens"].agrees
    mla = read_engine_log("KV Cache is allocated. #tokens: 524288, KV size: 34.31 GB")
    assert {found.what: found for found in compare_log(mla, get_model("deepseek-v3"))}["tokens"].agrees


def test_tensorrt_llm():
    text = """\
[TensorRT-LLM][INFO] Loaded engine size: 15317 MiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1134.01 MiB for execution context memory.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.14 GB GPU memory for runtime buffers.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 4.35 GB GPU memory for decoder.
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 79.10 GiB, available: 60.1 GiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (4608).
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 3445
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).
[02/14/2025-09:38:53] [TRT-LLM] [I] max_seq_len=131072, max_num_requests=2048, max_num_tokens=8192
"""
    log = read_engine_log(text)
    assert log.engine == "TensorRT-LLM"
    assert (log.weights_bytes, log.kv_bytes) == (15317 * MIB, 26.91 * GIB)  # the last allocation
    assert (log.num_blocks, log.block_size, log.num_tokens, log.max_len) == (3445, 64, 220_480, 131_072)
    assert log.activation_bytes == 1134.01 * MIB and log.other_bytes == pytest.approx(5.49 * GIB)
    assert log.unrecognized == 0
    rows = {found.what: found for found in compare_log(log, get_model("llama-3.1-8b"))}
    assert rows["weights"].agrees and rows["tokens"].agrees and rows["blocks"].agrees
    old = read_engine_log("Allocate 69524783104 bytes for k/v cache. \nUsing 132608 tokens in paged KV cache.")
    assert (old.engine, old.kv_bytes, old.num_tokens) == ("TensorRT-LLM", 69_524_783_104, 132_608)
    # Llama 2 7B: 524,288 bytes a token, exactly
    assert {found.what: found for found in compare_log(old, get_model("llama-2-7b"))}["tokens"].ratio == 1.0


# What llama.cpp of 2026 printed for the course's model with 8 slots: first a trial without memory, then the real thing.
LLAMA_CPP = """\
0.00.069.539 I print_info: file size   = 92.10 MiB (5.74 BPW)
0.00.202.586 I print_info: n_ctx_train           = 8192
0.00.209.198 I load_tensors:          CPU model buffer size =     0.00 MiB
0.00.211.027 I llama_context: n_seq_max             = 8
0.00.211.028 I llama_context: n_ctx                 = 4096
0.00.211.028 I llama_context: n_ctx_seq             = 512
0.00.213.078 I llama_context:        CPU  output buffer size =     1.50 MiB
0.00.213.650 I llama_kv_cache:        CPU KV buffer size =     0.00 MiB
0.00.213.668 I llama_kv_cache: size =   90.00 MiB (   512 cells,  30 layers,  8/8 seqs), K (f16):   45.00 MiB, V (f16):   45.00 MiB
0.00.220.987 I sched_reserve:        CPU compute buffer size =    15.14 MiB
0.00.383.476 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.386.137 I llama_context: n_seq_max             = 8
0.00.386.151 I llama_context: n_ctx                 = 4096
0.00.386.164 I llama_context: n_ctx_seq             = 512
0.00.386.789 I llama_context:        CPU  output buffer size =     1.50 MiB
0.00.387.147 I llama_kv_cache:        CPU KV buffer size =    90.00 MiB
0.00.439.090 I llama_kv_cache: size =   90.00 MiB (   512 cells,  30 layers,  8/8 seqs), K (f16):   45.00 MiB, V (f16):   45.00 MiB
0.00.441.114 I sched_reserve:        CPU compute buffer size =    15.14 MiB
"""  # noqa: E501


def test_llama_cpp_of_today():
    log = read_engine_log(LLAMA_CPP)
    assert log.engine == "llama.cpp"
    assert (log.weights_bytes, log.kv_bytes) == (92.1 * MIB, 90 * MIB)  # once, although printed twice
    assert (log.num_tokens, log.max_len, log.concurrency) == (4096, 512, 8.0)  # 512 cells in each of 8 streams
    assert (log.activation_bytes, log.other_bytes) == (15.14 * MIB, 1.5 * MIB)
    bits = {"weight_bits": 4, "group_size": 32, "zero_bits": 16, "part_bits": {"embedding": 8.5, "norms": 32}}
    rows = {found.what: found for found in compare_log(log, get_model("smollm2-135m"), **bits)}
    assert rows["weights"].agrees and rows["tokens"].ratio == 1.0


def test_llama_cpp_of_other_generations():
    two_devices = """\
load_tensors:        CUDA0 model buffer size =  3000.00 MiB
load_tensors:   CPU_Mapped model buffer size =  1437.80 MiB
llama_context: n_ctx         = 2048
llama_context: n_ctx_per_seq = 2048
llama_kv_cache_unified: size =  256.00 MiB (  2048 cells,  32 layers,  1 seqs), K (f16):  128.00 MiB, V (f16): 128 MiB
llama_context:      CUDA0 compute buffer size =   300.00 MiB
"""
    log = read_engine_log(two_devices)
    assert (log.weights_bytes, log.kv_bytes, log.num_tokens) == (pytest.approx(4437.8 * MIB), 256 * MIB, 2048)
    rows = {found.what: found for found in compare_log(log, get_model("llama-3.1-8b"))}
    assert rows["tokens"].ratio == 1.0  # fact F8
    older = """\
llm_load_tensors:        CPU buffer size =  4437.80 MiB
llama_new_context_with_model: n_ctx      = 2048
llama_new_context_with_model: KV self size  =  256.00 MiB, K (f16):  128.00 MiB, V (f16):  128.00 MiB
llama_new_context_with_model:        CPU compute buffer size =   258.50 MiB
"""
    log = read_engine_log(older)
    assert (log.weights_bytes, log.kv_bytes, log.num_tokens) == (4437.8 * MIB, 256 * MIB, 2048)
    assert read_engine_log("llama_init_from_file: kv self size  =  400.00 MB").kv_bytes == 400 * MIB
    quantized = read_engine_log("llama_kv_cache: size = 34.00 MiB ( 2048 cells, 16 layers, 1/1 seqs), K (q8_0): 17.00")
    rows = {found.what: found for found in compare_log(quantized, get_model("llama-3.2-1b"), kv_bits=8.5)}
    assert rows["tokens"].ratio == 1.0  # fact F9


def test_windowed_layers_have_a_cache_of_their_own():
    text = """\
llama_context: n_ctx = 8192
llama_kv_cache: size = 80.00 MiB ( 8192 cells, 10 layers, 1/1 seqs), K (f16): 40.00 MiB, V (f16): 40.00 MiB
llama_kv_cache: size = 65.00 MiB ( 1280 cells, 52 layers, 1/1 seqs), K (f16): 32.50 MiB, V (f16): 32.50 MiB
"""
    log = read_engine_log(text)
    assert (log.kv_bytes, log.num_tokens) == (145 * MIB, 8192)


# --- what is not a log ----------------------------------------------------------------------------------------------


def test_unknown_text_says_what_is_known():
    log = read_engine_log("hello\n\nthis is not a log\n")
    assert (log.engine, log.unrecognized, log.recognized, log.fits) == ("", 2, (), True)
    assert "no line of 2 was recognized" in log.message and "vLLM, SGLang, TensorRT-LLM, llama.cpp" in log.message
    with pytest.raises(ValueError, match="log must have at least one recognized line, got none"):
        compare_log(log, get_model("llama-3.1-8b"))
    some = read_engine_log("hello\nAvailable KV cache memory: 10.55 GiB\nbye")
    assert "1 lines recognized, 2 not: KV cache 10.55 GiB" in some.message
    assert "Not found: weights, activations" in some.message
    assert some.recognized == ("Available KV cache memory: 10.55 GiB",)
    assert some.readings[0] == engine_logs.Reading("vLLM", "kv", 10.55 * GIB, 2)


def test_it_is_also_in_capacity():
    assert capacity.read_engine_log is engine_logs.read_engine_log
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_engine_log("").engine = "vLLM"


@pytest.mark.parametrize("value", [None, b"# GPU blocks: 1", 7, ["# GPU blocks: 1"]])
def test_only_text_is_read(value):
    with pytest.raises(ValueError, match="text must be the log as a str, got "):
        read_engine_log(value)


def test_a_huge_text_is_refused():
    with pytest.raises(ValueError, match="text must be at most 5,000,000 characters, got 5,000,001"):
        read_engine_log("x" * 5_000_001)


SMALL = get_model("llama-3.2-1b")


def check_any(text: str) -> None:
    """Reads anything; of what comes back nothing is negative, and comparing raises nothing but ValueError."""
    log = read_engine_log(text)
    assert len([line for line in log.recognized if line]) + log.unrecognized == sum(
        bool(line.strip()) for line in text.split("\n")
    )
    for name, value in dataclasses.asdict(log).items():
        if isinstance(value, int | float):
            assert value >= 0, name
    assert log.message.encode()
    try:
        rows = compare_log(log, SMALL)
    except ValueError:
        return
    for found in rows:
        assert found.logged >= 0 and (found.predicted is None or found.predicted >= 0), str(found)


LINES = [line for text in (*LOGS.values(), LLAMA_CPP) for line in text.splitlines()]
PIECES = st.sampled_from(
    [*LINES, "GiB", "-", "(", ")", " " * 50, "9" * 30, "\x00", "\ud800", "٣٤", "e308", "=", "None"]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES | st.text(max_size=20), max_size=25), st.sampled_from(["\n", "", " ", "\r\n", "\x85"]))
@example(["GPU KV cache size: 0 tokens", "Maximum concurrency for 0 tokens per request: 0.00x"], "\n")
@example(["tensor_parallel_size=0", "Available KV cache memory: 0 GiB", "GPU KV cache size: 1 tokens"], "\n")
@example(["max seq len (9), (-0.16 GiB KV cache is needed", "Loading model weights took -1 GB"], "\n")
@example(["gpu_memory_utilization=1.9, total_gpu_memory=0.00GiB", "kv_cache_size=-0.00GiB"], "\n")
@example(["# GPU blocks: 99,999,999,999,999,999", "Available KV cache memory: 999999999999.999999 GiB"], "\n")
@example(["llama_kv_cache: size = 0.00 MiB ( 0 cells, 0 layers, 0/0 seqs), K (f16)", "llama_context: n_ctx = 0"], "\n")
def test_hostile_text(pieces, between):
    check_any(between.join(pieces))


@pytest.mark.parametrize("row_id", LOGS)
def test_a_log_cut_or_mixed_up_anywhere(row_id):
    rng, text = random.Random(0), LOGS[row_id]
    for _ in range(20):
        check_any(text[: rng.randrange(len(text))])
        characters = list(text)
        for _ in range(30):
            characters[rng.randrange(len(characters))] = chr(rng.choice([0, 10, 32, 48, 57, 0x663, 0xD800, 0x1F600]))
        check_any("".join(characters))


PATHOLOGICAL = [
    *("\x00", " ", "(", "9", "model weights take ", "cells, ", "# GPU blocks: 1", "total_gpu_memory ("),
    *("#tokens: 1, K size: ", "n_ctx = 1: n_ctx = 2", "( 5 cells, 3 layers, 3/", "9 GiB KV cache is needed "),
    *("Load weight end." + "x" * 290, "GPU KV cache size: " + " " * 40, "available KV cache memory\n"),
    "load_tensors: a buffer size = 1 MiB\n: n_ctx = 3\n",
]


@pytest.mark.parametrize("piece", PATHOLOGICAL)
def test_long_text_takes_no_long_time(piece):
    text = (piece * (1_000_000 // len(piece) + 1))[:1_000_000]
    begin = time.perf_counter()
    read_engine_log(text)
    assert time.perf_counter() - begin < 10  # well below one second on a quiet machine
