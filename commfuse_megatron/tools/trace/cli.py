"""`commfuse trace`: what is taken and refused, and which configuration is traced.

One overlapped linear, call by call; one attention block (`--attention`); a whole Megatron step (`--step`). What runs on
the ranks is in `reports.py`.
"""

import argparse
from typing import Any

from commfuse_megatron.config import OverlapConfig, PassConfig, TransportConfig, config_file_from_environment
from commfuse_megatron.tools.common.cases import (
    CPU_SHRINK,
    Case,
    attention_case,
    linear_case,
    tokens_of,
)
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import (
    add_rank_options,
    choices_of,
    for_ranks,
    refuse_given,
    require_positive,
)
from commfuse_megatron.tools.common.output import require_files, require_names_for_files
from commfuse_megatron.tools.common.ranks import (
    UsageError,
    choose_num_ranks,
    choose_several_ranks,
    require_megatron,
    require_transformer_engine,
)

SUMMARY = "show when what ran: a linear, an attention block or a Megatron step, as trace, picture and table"
EXAMPLE = """commfuse trace --op all_gather_linear --pass backward --ranks 2
  commfuse trace --case llama-70b.fc2 --device cuda --profiler --calls 2 --output figures
  commfuse trace --attention --ranks 2 --paths row_parallel query_split --splits 2
  commfuse trace --step --model llama-8b --device cuda --transformer-impl transformer_engine"""

OPS = ("all_gather_linear", "linear_reduce_scatter")
ATTENTION_PATHS = ("sequential", "row_parallel", "query_split")

_OF_STEPS = ("model", "layers", "batch", "context_parallel", "transformer_impl", "fusions", "rounds", "runs")
_OF_OPERATIONS = ("op", "case", "N", "K", "tokens", "pass_name", "calls", "profiler", "attention")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse trace` takes."""
    add_rank_options(parser)
    add = parser.add_argument
    what = "of the traced linears (default: the configuration's)"
    add("--path", choices=choices_of(PassConfig, "path"), help=what)
    add("--algorithm", choices=choices_of(PassConfig, "algorithm"), help="default: the configuration's")
    add("--chunks", type=int, metavar="m", help="chunks per shard")
    add("--transport", choices=choices_of(TransportConfig, "backend"), help="default auto")
    add("--config", metavar="FILE", help="YAML that the options above change (default: $COMMFUSE_CONFIG)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, cuda bfloat16")
    what = "where picture and trace go; made if missing (default trace_output)"
    add("--output", metavar="DIR", default="trace_output", help=what)
    add("--name", metavar="NAME", help="of the files (default: from what is traced)")
    what = "sequence of a block (default 8192) or a step (default 256 on cpu; on cuda 1024, llama 8192)"
    add("--seq", type=int, metavar="S", help=what)
    add = parser.add_argument_group("one operation (the default)").add_argument
    add("--op", choices=OPS, help="default: that of the case")
    add("--pass", dest="pass_name", choices=("fprop", "backward"), default="fprop", help="default fprop")
    what = "a linear of a known model, e.g. llama-70b.fc2 (cuda: the default), or an attention block of one"
    add("--case", metavar="CASE", help=what)
    add("--tokens", type=int, metavar="M", help="of the full sequence (default 512 on cpu, 8192 on cuda)")
    add("--N", type=int, help="output features of one rank's weight (default 512)")
    add("--K", type=int, help="input features of one rank's weight (default 512)")
    add("--calls", type=int, default=5, metavar="n", help="recorded calls (default 5)")
    add("--profiler", action="store_true", help="look at kernels and copies by stream (cuda only)")
    title = "one attention block (also --pass, --case, --calls, --profiler and --seq)"
    add = parser.add_argument_group(title).add_argument
    what = "attention with its projection; --path, --algorithm and --chunks are of row_parallel's projection"
    add("--attention", action="store_true", help=what)
    what = f"of {', '.join(ATTENTION_PATHS)} (default all, in this order)"
    add("--paths", nargs="+", choices=ATTENTION_PATHS, metavar="P", help=what)
    what = "splits per shard of query_split (default: the configuration's)"
    add("--splits", type=int, metavar="m", help=what)
    add("--shrink", type=int, metavar="F", help="divide all sizes by F (default 1; 64 on the CPU)")
    add = parser.add_argument_group("a whole step (also --seq)").add_argument
    add("--step", action="store_true", help="forward and backward of a Megatron GPT, stock and planned")
    add("--model", choices=("demo", "llama-8b", "llama-70b"), default="demo", help="default demo")
    add("--layers", type=int, metavar="L", help="default 2, llama 4")
    add("--batch", type=int, default=1, metavar="B", help="default 1")
    what = "so many ranks share each sequence, by a2a (default 1); the others are tensor parallel"
    add("--context-parallel", type=int, default=1, metavar="C", help=what)
    impls = ("local", "transformer_engine")
    add("--transformer-impl", choices=impls, default="local", help="attention and norms")
    add("--fusions", action="store_true", help="Megatron's fused activation, dropout and rotary kernels")
    add("--rounds", type=int, default=9, metavar="n", help="timed steps of each variant in a run (default 9)")
    add("--runs", type=int, default=1, metavar="n", help="in each, variants take turns (default 1)")


def run(arguments: argparse.Namespace) -> int:
    """Trace what is asked for. 0: done; 2: the plugin overlapped nothing of a step."""
    if not arguments.attention:
        refuse_given(
            arguments, ("paths", "splits", "shrink"), "these are of an attention block; add --attention, or leave out"
        )
    if arguments.name is not None:
        require_names_for_files("--name", arguments.name)
    if arguments.transport in ("nccl", "copy_engine") and arguments.device != "cuda":
        raise UsageError(f"--transport {arguments.transport} carries tensors of --device cuda only")
    if arguments.path not in (None, "auto", "sliced"):
        refuse_given(arguments, ("algorithm", "chunks"), f"--path {arguments.path} sends no chunks: leave out")
    if arguments.step:
        num_ranks = choose_num_ranks(arguments.ranks)
        options = _checked_step(arguments, num_ranks)
    else:
        if arguments.profiler and arguments.device != "cuda":
            raise UsageError("--profiler looks at GPU kernels; use it with --device cuda")
        if arguments.path in ("bulk", "async") and arguments.pass_name == "fprop":
            raise UsageError(f"--path {arguments.path} is a path of the backward pass; add --pass backward")
        if arguments.attention:
            _require_path_of(OPS[1], arguments)  # the projection's
        num_ranks = choose_several_ranks(arguments.ranks)
        options = (_checked_block if arguments.attention else _checked_linear)(arguments, num_ranks)
    from commfuse_megatron.tools.trace import reports

    linear_or_block = reports.block_on_rank if arguments.attention else reports.linear_on_rank
    body = reports.step_on_rank if arguments.step else linear_or_block
    return launch(body, options, num_ranks=num_ranks, device_type=arguments.device)


def _ready(arguments: argparse.Namespace, name: str, **worked_out: Any) -> argparse.Namespace:
    """What the ranks get: the options, with name, dtype and configuration. Files that cannot be are refused."""
    name = arguments.name or name
    require_files(arguments.output, (f"{name}.json", f"{name}.png"))
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return for_ranks(arguments, **{"name": name, "dtype": dtype, "config": config_of(arguments)} | worked_out)


def config_of(arguments: argparse.Namespace) -> OverlapConfig:
    """The configuration of `--config`, else the environment's, with what other options force in the traced passes."""
    require_positive(arguments, ("chunks",))
    file = arguments.config or config_file_from_environment()
    base = OverlapConfig.from_file(file) if file else OverlapConfig()
    data = base.to_dict()
    passes = {None: ("fprop", "dgrad"), "fprop": ("fprop",), "backward": ("dgrad",)}
    for name in passes[None if arguments.step else arguments.pass_name]:
        is_backward_only = arguments.path in ("bulk", "async") and name == "fprop"
        if arguments.path and not is_backward_only:
            data["linear"][name]["path"] = arguments.path
        if arguments.algorithm:
            data["linear"][name]["algorithm"] = arguments.algorithm
        if arguments.chunks is not None:
            data["linear"][name]["chunks_per_shard"] = arguments.chunks
    if arguments.transport:
        data["transport"]["backend"] = arguments.transport
    if arguments.path == "sequential" and not arguments.step and not arguments.attention:
        data["kernel"]["gemm"] = "torch"  # plain collective, plain GEMM
    return OverlapConfig.from_dict(data, source="these options")


# --- one linear -------------------------------------------------------------------------------------------------------


def _checked_linear(arguments: argparse.Namespace, num_ranks: int) -> argparse.Namespace:
    refuse_given(arguments, ("seq",), "of --attention and --step; one linear has --tokens: leave out")
    refuse_given(arguments, _OF_STEPS, "these are of a whole step; add --step, or leave out")
    require_positive(arguments, ("calls", "tokens", "N", "K"))
    op, M, N, K = _problem(arguments, num_ranks)
    _require_path_of(op, arguments)
    rows = M // num_ranks
    if (arguments.chunks or 1) > max(1, rows):
        raise UsageError(f"--chunks {arguments.chunks}: a shard of {M} tokens on {num_ranks} ranks has {rows} rows")
    return _ready(arguments, f"{op}_{arguments.pass_name}", op=op, M=M, N=N, K=K)


def _require_path_of(op: str, arguments: argparse.Namespace) -> None:
    if arguments.path == "async" and op != OPS[0]:
        raise UsageError(f"--path async is a path of {OPS[0]}'s backward pass, whose GEMMs need not wait; not of {op}")


def _problem(arguments: argparse.Namespace, num_ranks: int) -> tuple[str, int, int, int]:
    """(op, M, N, K), N and K of one rank's weight."""
    is_small = arguments.device == "cpu"
    M = arguments.tokens or (512 if is_small else 8192)
    if arguments.case is None and (arguments.N or arguments.K or is_small):
        return arguments.op or OPS[1], M, arguments.N or 512, arguments.K or 512
    if arguments.N or arguments.K:
        raise UsageError("--case gives N and K; leave out --N and --K, or --case")
    name = arguments.case or ("llama-70b.qkv" if arguments.op == OPS[0] else "llama-70b.fc2")
    case = linear_case(name, M, num_ranks)
    if arguments.op not in (None, case.op):
        raise UsageError(f"--case {name} is a case of {case.op}, not {arguments.op}; leave --op out")
    return case.op, case.M, case.N, case.K


# --- one attention block ----------------------------------------------------------------------------------------------


def _checked_block(arguments: argparse.Namespace, num_ranks: int) -> argparse.Namespace:
    refuse_given(arguments, ("op", "tokens", "N", "K", *_OF_STEPS), "--attention traces one attention block; leave out")
    require_positive(arguments, ("calls", "seq", "splits", "shrink"))
    paths = arguments.paths or ATTENTION_PATHS
    if len(set(paths)) < len(paths):
        raise UsageError(f"--paths {' '.join(paths)}: name each one once")
    if "row_parallel" not in paths:
        of_projections = ("path", "algorithm", "chunks")
        refuse_given(arguments, of_projections, "no path is row_parallel, whose projection is meant: leave out")
    if "query_split" not in paths:
        refuse_given(arguments, ("splits",), "no path is query_split: leave out")
    case = _block(arguments, num_ranks)
    configs = {path: _config_of_path(arguments, path) for path in paths}
    splits = configs["query_split"].attention.splits_per_shard if "query_split" in configs else None
    rows = case.rows // num_ranks
    if splits is not None and splits > rows:
        shrunk = f" (sizes are divided by {case.shrink}: --shrink)" if case.shrink > 1 else ""
        given = "--splits" if arguments.splits is not None else "attention.splits_per_shard"
        raise UsageError(f"{given} {splits}: a shard has {rows} rows{shrunk}")
    return _ready(arguments, f"{case.name}_{arguments.pass_name}", case=case, configs=configs)


def _block(arguments: argparse.Namespace, num_ranks: int) -> Case:
    name = arguments.case or "llama-8b.attention"
    (M,) = tokens_of(name, (arguments.seq or 8192,))
    case = attention_case(name, M, num_ranks, arguments.shrink or (1 if arguments.device == "cuda" else CPU_SHRINK))
    if arguments.seq and tokens_of(name, (0,)) != (0,):
        raise UsageError(f"--case {name} has a sequence of its own; leave out --seq")
    return case


def _config_of_path(arguments: argparse.Namespace, path: str) -> OverlapConfig:
    data = config_of(arguments).to_dict()
    data["attention"]["path"] = path
    if path != "query_split":
        data["attention"].update(splits_per_shard=None, backward="auto")
    else:
        if arguments.splits is not None:
            data["attention"]["splits_per_shard"] = arguments.splits
        if data["attention"]["backward"] == "auto":
            data["attention"]["backward"] = path
    if path == "sequential":
        data["kernel"]["gemm"] = "torch"  # plain collective, plain GEMM
    return OverlapConfig.from_dict(data, source="these options")


# --- a whole step -----------------------------------------------------------------------------------------------------


def _checked_step(arguments: argparse.Namespace, num_ranks: int) -> argparse.Namespace:
    require_megatron()
    refuse_given(arguments, _OF_OPERATIONS, "--step traces a whole model; leave out")
    if arguments.path == "sequential":
        raise UsageError("--path sequential: every step is traced without the plugin, too; leave it out")
    is_demo = arguments.model == "demo"
    if not is_demo and arguments.device == "cpu":
        raise UsageError(f"--model {arguments.model} is for GPUs; use --model demo, or --device cuda")
    sequence = arguments.seq or (1024 if arguments.device == "cuda" else 256) * (1 if is_demo else 8)
    if sequence % num_ranks:
        raise UsageError(f"--seq {sequence} must be a multiple of the {num_ranks} ranks")
    if num_ranks not in (2, 4, 8):
        raise UsageError(f"the models can be cut for 2, 4 or 8 ranks, not {num_ranks}")
    require_positive(arguments, ("seq", "layers", "batch", "rounds", "runs", "context_parallel"))
    _require_shared_sequences(arguments.context_parallel, arguments, sequence, num_ranks)
    if arguments.transformer_impl == "transformer_engine":
        if arguments.device == "cpu":
            raise UsageError("--transformer-impl transformer_engine is for GPUs; leave it out, or add --device cuda")
        require_transformer_engine()
    layers = arguments.layers or (2 if is_demo else 4)
    return _ready(arguments, f"step_{arguments.model}", layers=layers, seq=sequence)


def _require_shared_sequences(sharing: int, arguments: argparse.Namespace, sequence: int, num_ranks: int) -> None:
    if sharing == 1:
        return
    if num_ranks % sharing:
        raise UsageError(f"--context-parallel {sharing} does not divide the {num_ranks} ranks")
    if arguments.transformer_impl == "local":
        raise UsageError(
            "--context-parallel: Megatron's local layers have none without the plugin, so there is no stock step to"
            " compare with; add --transformer-impl transformer_engine"
        )
    if sequence % (2 * sharing):
        raise UsageError(f"--seq {sequence} must be a multiple of {2 * sharing}, twice --context-parallel")
