"""`OpRecord`: what a context reports of each problem that it met."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One line of the report: a problem, the path it takes and how often it ran.

    M, N, K: tokens of the full sequence, output and input features of this rank's weight. transport: what carries it;
    on paths without transfers of ours the backend of the group's collectives.
    exposed_comm_us: mean over the latest recorded calls of the time in which a transfer ran and nothing computed; None
    unless the configuration records, and of the group's collectives, which are not recorded. predicted_us,
    measured_us: what the planner knew of the path taken; None where it did not ask. attention: the kernel of an
    attention; None for a linear, and where Megatron's own attention runs. attention_reason: why that and no faster one.
    gemm: what multiplied: "cuBLASLt" from tapes and graphs, the context's GEMM otherwise, "none" without a weight.
    modes: how many of the calls that a schedule carried ran "stepped", from a "tape" or as a "graph"; trials are not
    counted. details: what the planner settled of the path, in words. Of attention over a split sequence N and K are
    features of all heads of the result and of queries.
    """

    op: str
    pass_name: str
    M: int
    N: int
    K: int
    dtype: str
    group_size: int
    path: str
    reason: str
    algorithm: str
    chunks_per_shard: int
    transport: str
    gemm: str
    calls: int
    exposed_comm_us: float | None
    predicted_us: float | None = None
    measured_us: float | None = None
    attention: str | None = None
    attention_reason: str = ""
    modes: dict[str, int] = field(default_factory=dict)
    details: str = ""

    def __str__(self) -> str:
        how = self.path if self.path != "sliced" else f"sliced, {self.algorithm}, m={self.chunks_per_shard}"
        if self.path == "overlapped":
            how = f"overlapped, m={self.chunks_per_shard}"
        how = ", ".join(filter(None, (how, self.details)))
        kernel = "" if self.attention is None else f", {self.attention} attention"
        modes = ": " + ", ".join(f"{number} {mode}" for mode, number in self.modes.items()) if self.modes else ""
        # An attention that Megatron then runs itself, for one.
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}{modes}" if self.calls else "planned, never called"
        problem = f"{self.op} {self.pass_name}, M {self.M} N {self.N} K {self.K} {self.dtype}"
        return f"{problem}: {how}, {self.transport}{kernel}, {calls} ({self.reason})"
